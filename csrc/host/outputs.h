// The outputs of ops, on symbolic sizes, and what they hold where an op has nothing to compute.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/SymInt.h>

#include <initializer_list>

namespace htree {

// Uninitialised and contiguous.
inline at::Tensor new_tensor(c10::SymIntArrayRef shape, at::ScalarType dtype, const at::Tensor& like) {
  return at::empty_symint(shape, like.options().dtype(dtype).memory_format(at::MemoryFormat::Contiguous));
}

// The same with the shape and dtype of x.
inline at::Tensor new_tensor_like(const at::Tensor& x) {
  return new_tensor(x.sym_sizes(), x.scalar_type(), x);
}

// The gradient of x, uninitialised; undefined where it is not wanted.
inline at::Tensor new_gradient(bool wanted, const at::Tensor& x) {
  return wanted ? new_tensor_like(x) : at::Tensor();
}

// Fills those that are defined.
inline void fill_zeros(std::initializer_list<at::Tensor> outputs) {
  for (const at::Tensor& output : outputs) {
    if (output.defined()) output.zero_();
  }
}

}  // namespace htree
