// The layers of an attention call on the CPU: keys and values of every layer, their copies for the kernels,
// and what a query sees of them.
#pragma once

#include <numeric>

#include "ops/sparse_attention/cpu/query_worker.h"
#include "ops/tree_attention/kernels.h"

namespace htree::tree_attention {

// The keys and values of every layer; [0] is k and v themselves. docs/semantics/tree_attention.md §1.2
inline std::vector<std::pair<Tensor, Tensor>> build_layers(const Tensor& k, const Tensor& v,
                                                           const AttentionArgs& args) {
  std::vector<std::pair<Tensor, Tensor>> layers{{k, v}};
  const int64_t depth = num_layers(k.size(1), args.max_top_nodes, args.compression_rate);
  while (static_cast<int64_t>(layers.size()) < depth) {
    const auto [child_k, child_v] = layers.back();
    const int64_t parents = ceil_div(child_k.size(1), args.compression_rate);
    Tensor pk = at::empty({k.size(0), parents, k.size(2), k.size(3)}, k.options());
    Tensor pv = at::empty({k.size(0), parents, k.size(2), v.size(3)}, v.options());
    tree_build_cpu(child_k, child_v, args.compression_rate, pk, pv);
    layers.emplace_back(pk, pv);
  }
  return layers;
}

template <typename Real>
struct Pyramid {
  int64_t batch, num_queries, heads, num_tokens, kv_heads, value_dim, depth;
  int64_t num_lists;  // rows of a list tensor
  QueryShape shape;
  RotationTable table;
  std::vector<PackedLayers<Real>> layers;
  // One per layer; empty where no selection reads span means.
  std::vector<CpuPackedSpans<Real>> span_means;
  std::vector<int64_t> spans;        // tokens per node
  std::vector<int32_t> top_parents;  // 0, 1, ...: the list of the top, up to a query's own parent

  template <typename T>
  Pyramid(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionArgs& args, bool selects,
          bool gradients, Type<T> storage)
      : batch(q.size(0)),
        num_queries(q.size(1)),
        heads(q.size(2)),
        num_tokens(k.size(1)),
        kv_heads(k.size(2)),
        value_dim(v.size(3)),
        depth(num_layers(num_tokens, args.max_top_nodes, args.compression_rate)),
        num_lists(ceil_div(num_queries, args.selection_stride)) {
    const int64_t r = args.compression_rate;
    // A list names at most top_k parents, and never more than the bottom layer has; that of the top names all.
    int64_t top_nodes = num_tokens;
    for (int64_t layer = 1; layer < depth; ++layer)
      top_nodes = ceil_div(top_nodes, r);
    top_parents.resize(ceil_div(top_nodes, r));
    std::iota(top_parents.begin(), top_parents.end(), 0);
    const int64_t max_parents =
        std::max<int64_t>(std::min(args.top_k, ceil_div(num_tokens, r)), top_parents.size());
    shape = query_shape(q, kv_heads, value_dim, r, max_parents, args.selection, query_kernels<Real>().lanes);
    if (args.rotate) table = make_rotation<Real>(max_parents * r, shape, args.rope_base, args.inv_freq);
    int64_t layer = 0;
    for (const auto& [layer_k, layer_v] : build_layers(k, v, args)) {
      layers.push_back(PackedLayers<Real>::make(layer_k, layer_v, shape, rotation(), gradients, storage));
      spans.push_back(node_span(r, layer++));
    }
    span_means.resize(depth);
    if (selects && args.selection_span > 0) pack_span_means(k, args, storage);
  }

  // Skips layers of at most top_k nodes, all of which are selected.
  template <typename T>
  void pack_span_means(const Tensor& k, const AttentionArgs& args, Type<T> storage) {
    const int64_t span = args.selection_span;
    const Tensor means = at::empty({batch, ceil_div(num_tokens, span), kv_heads, k.size(3)}, k.options());
    span_means_cpu(k, span, means);
    for (int64_t layer = 1; layer < depth; ++layer) {
      if (layers[layer].num_nodes() <= args.top_k) continue;
      span_means[layer] = CpuPackedSpans<Real>(means, layers[layer].num_nodes(), spans[layer] / span, shape,
                                               rotation(), storage);
    }
  }

  Rotation<Real> rotation() const { return table.rotation<Real>(); }

  // The candidates of a token's query at the top layer, whose list is implied (docs/semantics/tree_attention.md §1.3).
  Candidates top_candidates(int64_t token, int64_t r) const {
    const int64_t node = token / spans[depth - 1];
    return candidates_of(top_parents.data(), node / r + 1, node, layers[depth - 1].num_nodes(), r);
  }

  // Writes that list as it is stored: its first virtual parents, then -1 up to `width`.
  void write_top_list(int64_t token, int64_t r, int64_t width, int32_t* list) const {
    const int64_t count = std::min(token / spans[depth - 1] / r + 1, width);
    for (int64_t i = 0; i < count; ++i) {
      list[i] = static_cast<int32_t>(i);
    }
    std::fill(list + count, list + width, -1);
  }
};

}  // namespace htree::tree_attention
