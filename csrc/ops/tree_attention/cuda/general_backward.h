// The backward for every dtype and shape, and the inputs and outputs that it shares
// with the tensor-core backward.
#pragma once

#include "ops/sparse_attention/cuda/gradient_tensors.h"
#include "ops/tree_attention/cuda/walk.h"

namespace htree::tree_attention {

// Inputs and wanted outputs of a backward call. A gradient that is not wanted is undefined, and so may `dlse` be.
struct Backward {
  const Tensor &dout, &dlse, &q, &out, &gmax, &gsum;
  const std::vector<Tensor>& parents;
  const Tensor &dq, &dk, &dv;

  void* data(const Tensor& gradient) const {
    return gradient.defined() ? gradient.mutable_data_ptr() : nullptr;
  }
};

// Where `backward.parents` has no lists, they are selected again.
void run_general_backward(const AttentionProblem& problem, const BackwardConfig& config,
                          const Backward& backward, const CudaTree& tree, cudaStream_t stream);

}  // namespace htree::tree_attention
