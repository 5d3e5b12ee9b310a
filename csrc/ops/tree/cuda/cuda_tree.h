// The tree over a call's keys on the GPU, and what both directions of attention need around it.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "ops/tree/cuda/tree_call.h"
#include "ops/tree/tree_kernels.h"

namespace htree::tree_attention {

// The layers of the tree. Those above the tokens take 1 / (r - 1) of the memory of K and V, and they live as
// long as this.
struct CudaTree {
  std::vector<Tensor> keys;    // per layer [B, N, H_kv, K]; [0] is k itself
  std::vector<Tensor> values;  // per layer [B, N, H_kv, V]
};

// The current device, as plan/ asks for it.
DeviceFacts current_device_facts();
// x [B, rows, heads, D] with a unit last stride, and whether its rows are aligned.
TensorView aligned_view_of(const Tensor& x);
// The tiles of `rows` keys and values in dense_layer_bytes() of memory.
DenseTiles lay_out_tiles(const AttentionProblem& problem, int64_t rows, char* memory);

AttentionProblem attention_problem(const Tensor& q, const Tensor& k, const Tensor& v,
                                   const AttentionArgs& args);
CudaTree build_cuda_tree(const Tensor& k, const Tensor& v, const AttentionArgs& args);

// A call as the tensor-core path sees it, and the device memory that it owns: one packed copy of K and V in
// all layers (up to 16/15 of their size, and 4 bytes per node) and the rotation tables. With selection_span
// also the span means: for each layer above the tokens, K divided by the span. The launches that fill all of
// it are on `stream` when this returns.
struct TensorCoreTree {
  TreeCall call;
  std::vector<Tensor> memory;
};
TensorCoreTree prepare_tensor_cores(const AttentionProblem& problem, const TreeConfig& config,
                                    const Tensor& q, const CudaTree& tree, bool selects, cudaStream_t stream);

// cos and sin in fp32, rounded from double, [min(k r, nodes a list can span),
// K/2]; undefined without rotation.
struct RopeTables {
  Tensor cos, sin;
};
RopeTables general_rope_tables(const AttentionProblem& problem, const Tensor& q, cudaStream_t stream);

// The frequencies that the caller gave, float64 [K/2] on the device of `like`; undefined where there are none.
Tensor given_frequencies(const std::vector<double>& inv_freq, const Tensor& like, cudaStream_t stream);

// The span means of k [B, T, H_kv, K]; undefined without a selection_span.
// docs/semantics/tree_attention.md §1.15
Tensor build_span_means(const Tensor& k, const AttentionArgs& args);

// The arguments of the staged launchers for queries from `first_query` on.
LayerArgs layer_args(const AttentionProblem& problem, int64_t layer, int64_t first_query);

}  // namespace htree::tree_attention
