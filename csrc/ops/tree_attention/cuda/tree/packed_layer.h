// The packed copy of a layer, see packed_parent.cuh. No torch.
#pragma once

#include "ops/tree_attention/cuda/launch_params.h"

namespace htree::tree_attention {

struct PackParams {
  TensorView keys;               // [B, N, H_kv, K]
  TensorView values;             // [B, N, H_kv, V]
  const float2* rope = nullptr;  // [>= 16, K/2]
  char* packed = nullptr;        // [B, H_kv, num_parents] packed parents
  int64_t num_nodes = 0;
  int64_t num_parents = 0;
  int64_t num_batches = 0;
  int64_t num_kv_heads = 0;
};
template <typename T, int kDim>
cudaError_t launch_pack_layer(const PackParams& params, cudaStream_t stream);

}  // namespace htree::tree_attention
