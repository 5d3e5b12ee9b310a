// The top layer as tiles for dense products, see dense_tiles.cuh. No torch.
#pragma once

#include "ops/tree_attention/cuda/launch_params.h"

namespace htree::tree_attention {

// The top layer as tiles, see dense_tiles.cuh; num_tiles = ceil(num_nodes / 128) per (batch, kv head).
struct DenseTiles {
  char* keys = nullptr;       // [B, H_kv, num_tiles] tiles
  char* values = nullptr;     // [B, H_kv, num_tiles] tiles
  float* scales = nullptr;    // [B, H_kv, num_tiles * 128]
  int32_t* scaled = nullptr;  // [B, H_kv, num_tiles]
  int num_tiles = 0;
};

struct DenseLayerParams {
  TensorView keys;               // [B, N, H_kv, K]
  TensorView values;             // [B, N, H_kv, V]
  const float2* rope = nullptr;  // [>= N, K/2]
  DenseTiles tiles;
  int64_t num_nodes = 0;
  int64_t num_batches = 0;
  int64_t num_kv_heads = 0;
};
template <typename T, int kDim>
cudaError_t launch_dense_layer(const DenseLayerParams& params, cudaStream_t stream);

}  // namespace htree::tree_attention
