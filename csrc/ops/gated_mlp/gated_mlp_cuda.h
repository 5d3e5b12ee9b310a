// What the CUDA entry points of the forward and the backward share.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstdint>

#include "host/cuda/hopper.h"
#include "ops/gated_mlp/cuda/gated_mlp_launch.h"
#include "ops/gated_mlp/gated_mlp.h"
#include "ops/gated_mlp/gated_mlp_config.h"

namespace htree::gated_mlp {

// cuBLAS must see the dtypes that it is given.
using WithoutAutocast = c10::impl::ExcludeDispatchKeyGuard;

inline bool is_half(const at::Tensor& x) {
  return x.scalar_type() != at::kFloat;
}

// a b in fp32. Half types are not rounded in between; fp32 follows torch's own rules (allow_tf32).
inline at::Tensor product(const at::Tensor& a, const at::Tensor& b) {
  return is_half(a) ? at::mm(a, b, at::kFloat) : at::mm(a, b);
}

template <typename T>
const T* data_of(const at::Tensor& x) {
  return x.defined() ? static_cast<const T*>(x.const_data_ptr()) : nullptr;
}
template <typename T>
T* mutable_data_of(const at::Tensor& x) {
  return x.defined() ? static_cast<T*>(x.mutable_data_ptr()) : nullptr;
}

// x [n, hidden] in a form that tensor copies can read: unit stride, rows and start aligned to 16 bytes.
// Otherwise a copy with padded rows.
inline at::Tensor with_aligned_rows(const at::Tensor& x) {
  constexpr int64_t kPack = 8;
  const bool aligned = x.stride(1) == 1 && (x.stride(0) % kPack == 0 || x.size(0) == 1) && x.stride(0) > 0 &&
                       reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0;
  if (aligned) {
    return x;
  }
  const int64_t pitch = (x.size(1) + kPack - 1) / kPack * kPack;
  at::Tensor copy = at::empty({x.size(0), pitch}, x.options()).narrow(1, 0, x.size(1));
  copy.copy_(x);
  return copy;
}

template <typename T>
Operand<T> operand_of(const at::Tensor& x) {
  // A single row may have any stride, but the descriptor wants a multiple of 16 bytes.
  return {data_of<T>(x), x.size(0) == 1 ? (x.size(1) + 7) / 8 * 8 : x.stride(0)};
}

inline Facts facts_of(const Operands& o, bool keeps_products) {
  return {o.sizes.rows,   o.sizes.inner,
          o.sizes.hidden, is_half(o.x) && has_hopper_kernels(),
          keeps_products, at::cuda::getCurrentDeviceProperties()->multiProcessorCount};
}

}  // namespace htree::gated_mlp
