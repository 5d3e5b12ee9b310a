// Launchers of the top layer's own kernels on Hopper (sm_90a): r = 16, fp16 or bf16 inputs, K = V in {32, 64,
// 128}, G in {1, 2, 4, 8, 16}. The candidates of a query are the nodes 0 ... n - 1 of the layer, so scores
// are dense products of warpgroups instead of a gather. No torch.
//
// A selection is three launches over the leaders of a chunk: references (log-sums), importances, select; the
// softmax over what was not selected is one launch over all queries of the chunk.
#pragma once

#include "ops/tree_attention/cuda/launch_params.h"

namespace htree::tree_attention {

// The top layer as tiles, see top_tiles.cuh; num_tiles = ceil(num_nodes / 128) per (batch, kv head).
struct TopTiles {
  char* keys = nullptr;       // [B, H_kv, num_tiles] tiles
  char* values = nullptr;     // [B, H_kv, num_tiles] tiles
  float* scales = nullptr;    // [B, H_kv, num_tiles * 128]
  int32_t* scaled = nullptr;  // [B, H_kv, num_tiles]
  int num_tiles = 0;
};

struct TopRelayParams {
  TensorView keys;               // [B, N, H_kv, K]
  TensorView values;             // [B, N, H_kv, V]
  const float2* rope = nullptr;  // [>= N, K/2]
  TopTiles tiles;
  int64_t num_nodes = 0;
  int64_t num_batches = 0;
  int64_t num_kv_heads = 0;
};
void launch_top_relay(const TensorCoreShape& shape, const TopRelayParams& params, cudaStream_t stream);

// What scores of a chunk are lowered by, in log2 units: [num_batches, num_lists, H_kv, G]. The log-sum over
// the candidates before the query's own node (kLse: with it), +inf where that is -inf; the maximum for
// kExpJoint.
struct TopReferenceParams {
  GatherParams gather;  // its blocks and lists are not read
  TopTiles tiles;       // from the chunk's first batch on
  Importance importance = Importance::kLseCausal;
  float* references = nullptr;
  int64_t reference_batch = 0;  // stride in elements
};
void launch_top_references(const TensorCoreShape& shape, const TopReferenceParams& params,
                           cudaStream_t stream);

// importances[b, list, kv head, p] = sum over g in order of 2^(score - reference), p < n - 1; further entries
// of a row's last tile are unspecified.
struct TopImportanceParams {
  TopReferenceParams reference;
  float* importances = nullptr;  // [num_batches, num_lists, H_kv, width]
  int64_t width = 0;             // a multiple of 128, >= the largest n - 1 of the chunk
};
void launch_top_importances(const TensorCoreShape& shape, const TopImportanceParams& params,
                            cudaStream_t stream);

// As launch_attend for the top layer, which is the first: writes max, sum and partial.
struct TopAttendParams {
  AttendParams attend;
  TopTiles tiles;
};
void launch_top_attend(const TensorCoreShape& shape, const TopAttendParams& params, cudaStream_t stream);

}  // namespace htree::tree_attention
