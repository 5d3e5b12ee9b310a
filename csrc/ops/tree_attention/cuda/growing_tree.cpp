#include "ops/tree_attention/cuda/growing_tree.h"

#include "ops/tree_attention/cuda/walk.h"

namespace htree::tree_attention {
namespace {

bool has_dense_top() {
  return hopper_kernels(current_device_facts());
}

}  // namespace

int64_t growing_tree_bytes(const AttentionProblem& problem) {
  return forward_config(problem).path == AttentionPath::kTensorCore
             ? growing_tree_bytes(problem, has_dense_top())
             : 0;
}

TreeChange growing_tree_change(const AttentionProblem& problem, int64_t begin) {
  return tree_change(problem, has_dense_top(), begin);
}

TreeCall growing_tree_call(const AttentionProblem& problem, const TreeConfig& config, HalfType dtype,
                           int64_t capacity, void* memory) {
  const bool hopper = has_dense_top();
  const AttentionProblem longest = with_tokens(problem, capacity);
  const TreeCapacity units = tree_capacity(longest, hopper);
  Workspace space(memory);
  const GrowingMemory at = lay_out_growing_tree(space, longest, units);
  TreeCall call;
  call.grows = true;
  call.problem = problem;
  call.config = config;
  call.shape = {dtype, static_cast<int>(problem.key_dim), static_cast<int>(problem.value_dim)};
  call.inv_freq = problem.args.inv_freq.empty() ? nullptr : at.inv_freq;
  call.rope = reinterpret_cast<float2*>(at.rope);
  if (problem.args.rotate) {
    call.fragment_rotations = reinterpret_cast<__half2*>(at.fragment_rotations);
    call.dim_rotations = reinterpret_cast<__half2*>(at.dim_rotations);
  }
  for (int64_t i = 0; i < problem.layers(); ++i) {
    TreeLayer layer;
    layer.num_nodes = problem.nodes(i);
    layer.num_parents = units.parents[i];
    layer.node_span = node_span(kTensorCoreRate, i);
    layer.packed = at.packed[i];
    if (packs_spans(problem, hopper, i)) {
      layer.spans = {at.spans[i], static_cast<int>(units.span_rows[i]), units.parents[i]};
    }
    call.layers.push_back(layer);
  }
  if (tiles_top(problem, hopper)) {
    call.top = lay_out_tiles(problem, units.top_tiles * kDenseTileNodes, at.top);
  }
  if (tiles_top_spans(problem, hopper)) {
    SpanTiles& spans = call.top_spans;
    spans.tiling = span_tiling(span_rows(problem, problem.layers() - 1));
    spans.num_tiles = static_cast<int>(units.top_span_tiles);
    spans.keys = at.top_span_keys;
    spans.scales = at.top_span_scales;
    spans.scaled = at.top_span_scaled;
  }
  return call;
}

void fill_growing_tables(const TreeCall& call, cudaStream_t stream) {
  prepare_tables(call, rope_positions(call.problem), stream);
}

}  // namespace htree::tree_attention
