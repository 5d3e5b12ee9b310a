// The walk through a tree on CUDA: its configurations for the current device, and the forward over copies that are filled.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "ops/tree/cuda/cuda_tree.h"
#include "ops/tree_attention/kernels.h"
#include "ops/tree_attention/plan/backward.h"
#include "ops/tree_attention/plan/forward.h"

namespace htree::tree_attention {

// The configurations for the current device.
ForwardConfig forward_config(const AttentionProblem& problem);
BackwardConfig backward_config(const AttentionProblem& problem);

// attention_forward on a call whose copies are filled. `parents` are the lists of each layer, or none.
void run_tensor_core_forward(const TreeCall& call, const ForwardConfig& config, const Tensor& out,
                             const Tensor& gmax, const Tensor& gsum, const std::vector<Tensor>& parents,
                             cudaStream_t stream);

}  // namespace htree::tree_attention
