// The tree over a call's keys on the GPU, and what both directions of attention need around it.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "ops/tree_attention/cuda/tree_call.h"
#include "ops/tree_attention/kernels.h"

namespace htree::tree_attention {

// Layers above the tokens are 1 / (r - 1) of K and V together; they live as long as this.
struct CudaTree {
  std::vector<Tensor> keys;    // per layer [B, N, H_kv, K]; [0] is k itself
  std::vector<Tensor> values;  // per layer [B, N, H_kv, V]
};

AttentionProblem attention_problem(const Tensor& q, const Tensor& k, const Tensor& v,
                                   const AttentionArgs& args);
// Configurations for the current device.
ForwardConfig forward_config(const AttentionProblem& problem);
BackwardConfig backward_config(const AttentionProblem& problem);

CudaTree build_cuda_tree(const Tensor& k, const Tensor& v, const AttentionArgs& args);

// The tensor-core view of a call and the device memory it owns: one packed copy of K and V (17/16 of their
// size and 4 bytes per node) and the rotation table. The launches that fill both are on `stream` when this
// returns.
struct TensorCoreTree {
  TreeCall call;
  std::vector<Tensor> memory;
};
TensorCoreTree prepare_tensor_cores(const AttentionProblem& problem, const TreeConfig& config,
                                    const Tensor& q, const CudaTree& tree, cudaStream_t stream);

// cos and sin [min(k r, nodes a list can span), K/2] in fp32, rounded from double; undefined without
// rotation.
struct RopeTables {
  Tensor cos, sin;
};
RopeTables general_rope_tables(const AttentionProblem& problem, const Tensor& q);

// Arguments of the staged launchers for the queries from `first_query` on.
LayerArgs layer_args(const AttentionProblem& problem, int64_t layer, int64_t first_query);

}  // namespace htree::tree_attention
