// Sizes and options that the stages of tree attention share. docs/semantics/tree_attention.md §1.1-1.3, §1.12
#pragma once

#include <cstdint>
#include <vector>

#include "device/sizes.h"
#include "ops/tree/options.h"

#if defined(__CUDACC__)
#define HTREE_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define HTREE_HOST_DEVICE inline
#endif

namespace htree::tree_attention {

// One call of a staged or fused op on one layer, with every optional argument resolved and checked. Query row
// i stands at token t = t0 + i. Row j of `parents` serves the queries with t / selection_stride == t0 /
// selection_stride + j. `top_k` is the width of the next lists, `list_width` the width of the given ones.
struct LayerArgs {
  int64_t layer = 0;              // 0 = tokens
  int64_t compression_rate = 16;  // r, children per parent
  int64_t list_width = 0;         // k of the given parents; a list spans at most list_width * r candidates
  int64_t top_k = 0;
  int64_t t0 = 0;
  int64_t selection_stride = 1;
  double scale = 1.0;
  SelectionOptions selection;
  int64_t selection_span = 0;  // tokens of a span mean that the selection scores, a divisor of r; 0 for None
};

// The token of a query of a call with `num_queries` of them.
inline int64_t token_of_query(const AttentionArgs& args, int64_t num_queries, int64_t query) {
  const int64_t piece_queries = num_queries / static_cast<int64_t>(args.starts.size());
  return args.starts[query / piece_queries] + query % piece_queries;
}

// The number of layers of the tree over `num_tokens` tokens; the top layer has at most `max_top_nodes` nodes.
inline int64_t num_layers(int64_t num_tokens, int64_t max_top_nodes, int64_t compression_rate) {
  int64_t layers = 1;
  for (int64_t n = num_tokens; n > max_top_nodes; n = ceil_div(n, compression_rate)) {
    ++layers;
  }
  return layers;
}

// r^exponent, capped far above any length.
inline int64_t node_span(int64_t compression_rate, int64_t exponent) {
  int64_t span = 1;
  for (int64_t i = 0; i < exponent; ++i) {
    if (span > (int64_t{1} << 62) / compression_rate) {
      return int64_t{1} << 62;
    }
    span *= compression_rate;
  }
  return span;
}

// ---- candidates, docs/semantics/tree_attention.md §1.3, for the CPU and the CUDA kernels
//
// A query whose list in a layer holds the parents P_0 < ... < P_{m-1} (then -1) has the candidates
// p in [0, n). Candidate p is node P_{p / r} * r + p mod r. Only the last parent is cut short, at
// the query's diagonal block.

// The number of candidates of a query whose diagonal block in the layer is `rightmost` = t / r^layer.
HTREE_HOST_DEVICE int64_t candidate_count(int64_t num_parents, int64_t rightmost, int64_t r) {
  return num_parents > 0 ? (num_parents - 1) * r + rightmost % r + 1 : 0;
}

// With open_next, the number of candidates that are selected by their key, the rightmost among them; the
// candidates behind them come next. 0 where that selects what the keys alone select.
HTREE_HOST_DEVICE int64_t best_with_neighbours(const SelectionOptions& selection, int64_t top_k,
                                               int64_t num_candidates) {
  return selection.open_next && top_k > 2 && num_candidates > top_k ? (top_k + 1) / 2 : 0;
}

// Whether a node takes part: it exists, and it starts at or before the query. Only a list
// that breaks the invariant (its last parent is the query's own) can name another node, and
// such a candidate contributes nothing.
HTREE_HOST_DEVICE bool node_present(int64_t node, int64_t rightmost, int64_t num_nodes) {
  return node >= 0 && node <= rightmost && node < num_nodes;
}

}  // namespace htree::tree_attention
