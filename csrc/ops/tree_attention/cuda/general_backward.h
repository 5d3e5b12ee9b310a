// The backward for every dtype and shape, and the inputs and outputs that it shares
// with the tensor-core backward.
#pragma once

#include <ATen/ops/empty.h>

#include "ops/tree/cuda/any/push_gradient.h"
#include "ops/tree_attention/cuda/walk.h"

namespace htree::tree_attention {

inline TensorView view_of(const Tensor& x) {
  return {x.const_data_ptr(), x.stride(0), x.stride(1), x.stride(2)};
}

inline Tensor scratch_of(int64_t elements, at::ScalarType dtype, const Tensor& like) {
  return at::empty({std::max<int64_t>(elements, 1)}, like.options().dtype(dtype));
}

// Inputs and wanted outputs of a backward call. A gradient that is not wanted is undefined, and so may `dlse` be.
struct Backward {
  const Tensor &dout, &dlse, &q, &out, &gmax, &gsum;
  const std::vector<Tensor>& parents;
  const Tensor &dq, &dk, &dv;

  void* data(const Tensor& gradient) const {
    return gradient.defined() ? gradient.mutable_data_ptr() : nullptr;
  }
};

// Rounds the sums of dK or dV to the dtype of a gradient, which may be their own.
inline StoreType store_type(const Tensor& gradient) {
  return gradient.scalar_type() == at::kFloat  ? StoreType::kFloat
         : gradient.scalar_type() == at::kHalf ? StoreType::kHalf
                                               : StoreType::kBFloat16;
}

// Where `backward.parents` has no lists, they are selected again.
void run_general_backward(const AttentionProblem& problem, const BackwardConfig& config,
                          const Backward& backward, const CudaTree& tree, cudaStream_t stream);

}  // namespace htree::tree_attention
