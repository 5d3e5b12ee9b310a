// Pushes the fp32 sums of dK and dV from the top of the tree down to the tokens, for every r. No torch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace htree::tree_attention {

// child[i] += parent[i / r] / (number of the parent's children). Both are [heads, nodes, dim], with nodes
// padded to a multiple of r.
struct PushParams {
  const float* parent = nullptr;  // null: nothing to add
  float* child = nullptr;
  int64_t heads = 0;  // B * H_kv
  int64_t num_nodes = 0;
  int64_t child_rows = 0;  // rows allocated per head
  int64_t parent_rows = 0;
  int64_t dim = 0;
  int64_t rate = 16;
};
cudaError_t launch_push_gradient(const PushParams& params, cudaStream_t stream);

// The same step for the tokens, rounded into `out` [B, N, H_kv, dim], contiguous.
enum class StoreType { kFloat, kHalf, kBFloat16 };
cudaError_t launch_store_gradient(const PushParams& params, int64_t num_kv_heads, StoreType type, void* out,
                                  cudaStream_t stream);

}  // namespace htree::tree_attention
