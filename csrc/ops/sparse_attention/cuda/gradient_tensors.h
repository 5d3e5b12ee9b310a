// Tensors as the launchers of gradients take them.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>

#include "ops/tree/cuda/any/push_gradient.h"
#include "ops/tree/cuda/launch_params.h"

namespace htree::tree_attention {

inline TensorView view_of(const at::Tensor& x) {
  return {x.const_data_ptr(), x.stride(0), x.stride(1), x.stride(2)};
}

inline at::Tensor scratch_of(int64_t elements, at::ScalarType dtype, const at::Tensor& like) {
  return at::empty({std::max<int64_t>(elements, 1)}, like.options().dtype(dtype));
}

// Rounds the sums of dK or dV to the dtype of a gradient, which may be their own.
inline StoreType store_type(const at::Tensor& gradient) {
  return gradient.scalar_type() == at::kFloat  ? StoreType::kFloat
         : gradient.scalar_type() == at::kHalf ? StoreType::kHalf
                                               : StoreType::kBFloat16;
}

}  // namespace htree::tree_attention
