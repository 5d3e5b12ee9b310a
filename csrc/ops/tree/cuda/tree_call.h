// A call of the tensor-core path: its sizes, inputs and tree in device memory, and the steps that both
// directions share. A step that launches kernels raises what a launch returned.
#pragma once

#include <c10/cuda/CUDAException.h>

#include <vector>

#include "ops/tree/cuda/copies.h"
#include "ops/tree/cuda/launch_params.h"
#include "ops/tree/plan/tree_config.h"

namespace htree::tree_attention {

struct TreeLayer {
  TensorView keys;    // [B, N, H_kv, K]
  TensorView values;  // [B, N, H_kv, V]
  int64_t num_nodes = 0;
  int64_t num_parents = 0;
  int64_t node_span = 1;
  char* packed = nullptr;  // [B, H_kv, num_parents] packed parents
  PackedSpans spans;       // where the layer is gathered and its nodes are scored by span means
};

// A call on one device: sizes, inputs, and the tree over the keys with the tokens first.
struct TreeCall {
  AttentionProblem problem;
  TreeConfig config;
  TensorCoreShape shape;
  TensorView queries;  // [B, T_q, H, K]
  std::vector<TreeLayer> layers;
  double* inv_freq = nullptr;  // [K/2] where the call has frequencies of its own
  float2* rope = nullptr;      // [rope_rows(), K/2]
  // Rotation tables of rotation_slots() slots, one per RotationOrder; those that `config`
  // asks for are filled. Null where nothing is rotated.
  __half2* fragment_rotations = nullptr;
  __half2* dim_rotations = nullptr;
  // The copies are those of a growing tree, which has space for the tokens' packed copy beside their tiles.
  bool grows = false;
  DenseTiles rows;      // tiles of the tokens that the dense and the masked rows see
  DenseTiles top;       // tiles of layers.back() where config.dense_top holds
  SpanTiles top_spans;  // the same where its nodes are scored by span means

  int64_t rope_rows() const {
    return walks(problem, config) ? list_capacity(problem) * kTensorCoreRate + 1
                                  : tiled_tokens(problem, config);
  }
  int64_t rotation_slots() const { return list_capacity(problem) + 1; }
  Frequencies frequencies() const { return {problem.args.rope_base, problem.args.rotate, inv_freq}; }
};

// The tiles from batch `batch` on.
inline DenseTiles tiles_of_batch(const TreeCall& call, DenseTiles tiles, int64_t batch) {
  const int64_t first = batch * call.problem.num_kv_heads * tiles.num_tiles;
  tiles.keys += first * dense_tile_bytes(call.problem.key_dim);
  tiles.values += first * dense_tile_bytes(call.problem.value_dim);
  tiles.scales += first * kDenseTileNodes;
  tiles.flags += first;
  return tiles;
}

// The part of PackParams or DenseLayerParams that follows from the call and a layer.
template <typename Params>
Params layer_params(const TreeCall& call, const TreeLayer& layer) {
  Params params;
  params.keys = layer.keys;
  params.values = layer.values;
  params.rope = call.rope;
  params.num_nodes = layer.num_nodes;
  params.num_batches = call.problem.batch;
  params.num_kv_heads = call.problem.num_kv_heads;
  return params;
}

// Batches from `batch` on, queries from `query` on.
struct Chunk {
  int64_t batch, num_batches, query, num_queries;
};

// The lists of a chunk at one layer; null for the implicit lists of the top.
struct ListSlice {
  int32_t* data = nullptr;
  int64_t batch = 0;  // stride in elements
};

// The part of a view that starts at a chunk; elements have 2 bytes.
TensorView at_row(TensorView view, int64_t batch, int64_t row);

// Everything but the lists, which the caller sets.
GatherParams gather_of(const TreeCall& call, size_t layer_idx, const Chunk& chunk);

// Calls launch(TypeTag<T>, IntTag<D>) for the compiled kernels of a shape.
template <typename F>
void launch_of_shape(const TensorCoreShape& shape, F&& launch) {
  C10_CUDA_CHECK(dispatch_shape(shape, launch));
}

// Fills call.inv_freq, `positions` rows of call.rope and the rotation tables.
void prepare_tables(const TreeCall& call, int64_t positions, cudaStream_t stream);
// Fills these tables, the tiles and the packed copy of every layer. With
// config.masked_rows that of the tokens comes later, in the place of their tiles.
void run_prepare(const TreeCall& call, cudaStream_t stream);

// Fills the packed copy of a layer, if it has one.
void pack_layer(const TreeCall& call, const TreeLayer& layer, cudaStream_t stream);

}  // namespace htree::tree_attention
