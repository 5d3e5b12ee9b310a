// The launchers of this folder: copies of the tree in the layouts of the kernels, each in a .cuh of its name, and
// tables that depend on positions alone, in tables.cu. No torch.
// A packed layer holds the children of each parent together, see packed_layer.cuh.
#pragma once

#include "ops/tree/cuda/launch_params.h"

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

// The top layer as tiles for dense products, see dense_layer.cuh. num_tiles is ceil(num_nodes / 128) per
// (batch, kv head).
struct DenseTiles {
  char* keys = nullptr;      // [B, H_kv, num_tiles] tiles
  char* values = nullptr;    // [B, H_kv, num_tiles] tiles
  float* scales = nullptr;   // [B, H_kv, num_tiles * 128]
  int32_t* flags = nullptr;  // [B, H_kv, num_tiles]: a byte for every kTileParts-th of a tile's rows
  int num_tiles = 0;
};
constexpr int kTileParts = 4;
// What a byte of the flags says, and where the same bits stand in the flags of a tile.
constexpr int kScaledKeys = 1, kInfiniteValues = 2;  // the latter for NaN too
constexpr int kInAnyPart = 0x01010101;

struct DenseLayerParams {
  TensorView keys;               // [B, N, H_kv, K]
  TensorView values;             // [B, N, H_kv, V]
  const float2* rope = nullptr;  // [>= N, K/2]; null: no rotation
  DenseTiles tiles;
  int64_t num_nodes = 0;
  int64_t num_batches = 0;
  int64_t num_kv_heads = 0;
};
template <typename T, int kDim>
cudaError_t launch_dense_layer(const DenseLayerParams& params, cudaStream_t stream);

// ---- span means of the tokens, by which nodes are scored with selection_span, see span_copies.cuh

// The span means of a gathered layer: for every parent and every j < rows a block with mean j of each
// of its 16 children.
struct PackedSpans {
  char* blocks = nullptr;   // [B, H_kv, num_parents, rows] blocks of packed_span_bytes(); null: none
  int rows = 1;             // span means of a node
  int64_t num_parents = 0;  // of the layer
};

// The span means of the top layer, as tiles for dense products.
struct SpanTiles {
  char* keys = nullptr;       // [B, H_kv, num_tiles] tiles
  float* scales = nullptr;    // [B, H_kv, num_tiles * 128]
  int32_t* scaled = nullptr;  // [B, H_kv, num_tiles]
  int num_tiles = 0;
  SpanTiling tiling;
};

struct SpanCopyParams {
  TensorView tokens;             // [B, T, H_kv, K]
  const float2* rope = nullptr;  // [positions of the layer, K/2]
  PackedSpans packed;            // what launch_pack_spans fills
  SpanTiles tiles;               // what launch_tile_spans fills
  int64_t num_tokens = 0;
  int64_t node_span = 1;  // of the layer
  int64_t num_batches = 0;
  int64_t num_kv_heads = 0;
  int span = 1;
};
template <typename T, int kDim>
cudaError_t launch_pack_spans(const SpanCopyParams& params, cudaStream_t stream);
template <typename T, int kDim>
cudaError_t launch_tile_spans(const SpanCopyParams& params, cudaStream_t stream);

// ---- tables: angles, and the lists of the top layer

// Radians per position: inv_freq[i] of dim i < K/2, or base^(-2i/K) where inv_freq is null, or 0 without `rotate`.
struct Frequencies {
  double base = 10000.0;
  bool rotate = true;
  const double* inv_freq = nullptr;  // [K/2] in device memory
};

// Writes `count` numbers of the host to device memory. They travel as arguments of kernels, so that nothing waits and
// a graph keeps its own copy.
cudaError_t launch_frequencies(double* to, const double* numbers, int64_t count, cudaStream_t stream);

// cos and sin of position * frequency, [size, K/2].
cudaError_t launch_rope_table(float2* table, int64_t size, int key_dim, const Frequencies& frequencies,
                              cudaStream_t stream);

// cos and sin of 16 j * frequency in fp16 for slots j < num_slots, [num_slots][cos, sin][K/4] pairs of dims
// i. In the order kDims a pair holds dims 2i and 2i + 1; kFragments is the order in which RotationFactors of
// rotated_half_query.cuh reads.
enum class RotationOrder { kDims, kFragments };
cudaError_t launch_rotation_table(__half2* table, int64_t num_slots, int key_dim, RotationOrder order,
                                  const Frequencies& frequencies, cudaStream_t stream);

// Lists that hold every parent, as at the top, for every r: parents 0 ... t / parent_span, then -1.
struct TopListParams {
  int32_t* lists = nullptr;  // [num_batches, num_lists, num_kv_heads, width], batches batch_lists lists apart
  int64_t num_batches = 0;
  int64_t num_lists = 0;
  int64_t batch_lists = 0;
  int64_t num_kv_heads = 0;
  int64_t width = 0;
  int64_t t0 = 0;  // token of the first list
  int64_t stride = 1;
  int64_t parent_span = 1;  // tokens of a parent
};
cudaError_t launch_top_lists(const TopListParams& params, cudaStream_t stream);

// The angles of `rope` [num_positions, K/2] in fp16, in the order in which rotate_query() in
// per_parent/parent_gradient.cuh reads them.
cudaError_t launch_position_rotations(const float2* rope, __half2* rotations, int64_t num_positions,
                                      int key_dim, cudaStream_t stream);

}  // namespace htree::tree_attention
