// The backward for every dtype and shape, and what both paths of it share.
#pragma once

#include <ATen/ops/empty.h>

#include "ops/tree_attention/cuda/tree/cuda_tree.h"

namespace htree::tree_attention {

inline TensorView view_of(const Tensor& x) {
  return {x.const_data_ptr(), x.stride(0), x.stride(1), x.stride(2)};
}

inline Tensor scratch_of(int64_t elements, at::ScalarType dtype, const Tensor& like) {
  return at::empty({std::max<int64_t>(elements, 1)}, like.options().dtype(dtype));
}

// What comes in and what is wanted; undefined gradients are not.
struct Backward {
  const Tensor &dout, &q, &out, &gmax, &gsum;
  const std::vector<Tensor>& parents;
  const Tensor &dq, &dk, &dv;

  void* data(const Tensor& gradient) const {
    return gradient.defined() ? gradient.mutable_data_ptr() : nullptr;
  }
};

// Lists in `backward.parents` are contiguous, or absent: then they are selected again.
void run_general_backward(const AttentionProblem& problem, const BackwardConfig& config,
                          const Backward& backward, const CudaTree& tree, cudaStream_t stream);

}  // namespace htree::tree_attention
