// The steps that fill a call's tables and copies, and the parts of them that a chunk reads.
#include "ops/tree/cuda/tree_call.h"

namespace htree::tree_attention {

namespace {

constexpr double kLog2E = 1.4426950408889634;

}  // namespace

TensorView at_row(TensorView view, int64_t batch, int64_t row) {
  view.data = static_cast<const char*>(view.data) + 2 * (batch * view.batch + row * view.row);
  return view;
}

GatherParams gather_of(const TreeCall& call, size_t layer_idx, const Chunk& chunk) {
  const AttentionProblem& p = call.problem;
  const TreeLayer& layer = call.layers[layer_idx];
  GatherParams g;
  g.queries = at_row(call.queries, chunk.batch, chunk.query);
  g.packed = layer.packed +
             chunk.batch * p.num_kv_heads * layer.num_parents * packed_parent_bytes(p.key_dim, p.value_dim);
  g.num_parents = layer.num_parents;
  g.rope = call.rope;
  g.score_scale = static_cast<float>(p.args.scale * kLog2E);
  g.node_span = layer.node_span;
  g.t0 = p.token_of(chunk.query);
  g.num_queries = static_cast<int>(chunk.num_queries);
  g.num_lists = static_cast<int>(ceil_div(chunk.num_queries, p.args.selection_stride));
  g.num_batches = static_cast<int>(chunk.num_batches);
  g.num_kv_heads = static_cast<int>(p.num_kv_heads);
  g.group = static_cast<int>(p.group());
  g.list_width = static_cast<int>(p.args.top_k);
  g.stride = static_cast<int>(p.args.selection_stride);
  return g;
}

namespace {

// Fills the copies of the span means of the layers that have them.
void copy_spans(const TreeCall& call, cudaStream_t stream) {
  const AttentionProblem& p = call.problem;
  SpanCopyParams params;
  params.tokens = call.layers[0].keys;
  params.rope = call.rope;
  params.num_tokens = p.num_keys;
  params.num_batches = p.batch;
  params.num_kv_heads = p.num_kv_heads;
  params.span = static_cast<int>(p.args.selection_span);
  for (const TreeLayer& layer : call.layers) {
    params.node_span = layer.node_span;
    params.packed = layer.spans;
    if (layer.spans.blocks) {
      launch_of_shape(call.shape, [&](auto type, auto dim) {
        return launch_pack_spans<typename decltype(type)::type, dim.value>(params, stream);
      });
    }
  }
  params.tiles = call.top_spans;
  if (call.top_spans.keys) {
    launch_of_shape(call.shape, [&](auto type, auto dim) {
      return launch_tile_spans<typename decltype(type)::type, dim.value>(params, stream);
    });
  }
}

}  // namespace

void pack_layer(const TreeCall& call, const TreeLayer& layer, cudaStream_t stream) {
  if (!layer.packed) return;
  PackParams pack = layer_params<PackParams>(call, layer);
  pack.packed = layer.packed;
  pack.num_parents = layer.num_parents;
  launch_of_shape(call.shape, [&](auto type, auto dim) {
    return launch_pack_layer<typename decltype(type)::type, dim.value>(pack, stream);
  });
}

void prepare_tables(const TreeCall& call, int64_t positions, cudaStream_t stream) {
  const AttentionProblem& p = call.problem;
  const int key_dim = static_cast<int>(p.key_dim);
  if (call.inv_freq) {
    C10_CUDA_CHECK(launch_frequencies(call.inv_freq, p.args.inv_freq.data(), p.key_dim / 2, stream));
  }
  C10_CUDA_CHECK(launch_rope_table(call.rope, positions, key_dim, call.frequencies(), stream));
  const auto rotations = [&](__half2* table, RotationOrder order) {
    if (!table) return;
    C10_CUDA_CHECK(
        launch_rotation_table(table, call.rotation_slots(), key_dim, order, call.frequencies(), stream));
  };
  rotations(call.fragment_rotations, RotationOrder::kFragments);
  rotations(call.dim_rotations, RotationOrder::kDims);
}

void run_prepare(const TreeCall& call, cudaStream_t stream) {
  const AttentionProblem& p = call.problem;
  prepare_tables(call, call.rope_rows(), stream);
  for (size_t i = call.config.masked_rows > 0 ? 1 : 0; i < call.layers.size(); ++i) {
    pack_layer(call, call.layers[i], stream);
  }
  copy_spans(call, stream);
  const auto lay_out = [&](const TreeLayer& layer, const DenseTiles& tiles, int64_t rows) {
    DenseLayerParams pack = layer_params<DenseLayerParams>(call, layer);
    pack.tiles = tiles;
    pack.num_nodes = rows;
    pack.rope = p.args.rotate ? call.rope : nullptr;  // the table may end before the tokens do
    launch_of_shape(call.shape, [&](auto type, auto dim) {
      return launch_dense_layer<typename decltype(type)::type, dim.value>(pack, stream);
    });
  };
  if (const int64_t rows = tiled_tokens(p, call.config); rows > 0) {
    lay_out(call.layers.front(), call.rows, rows);
  }
  if (call.config.dense_top) {
    lay_out(call.layers.back(), call.top, call.layers.back().num_nodes);
  }
}

}  // namespace htree::tree_attention
