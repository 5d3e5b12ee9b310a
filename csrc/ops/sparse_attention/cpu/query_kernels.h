// The CPU kernels that work on one query and one key/value head: all G query heads of it against one
// layer of the tree. There is one table per instruction set (host/cpu/isa.h); that of double is compiled
// for the baseline alone.
//
// A layer is laid out once per call so that every inner loop has unit stride and no tail
// (docs/semantics/tree_attention.md §1.4). With K'_c = R_{c mod r} K_c, the score of candidate p = j r + i of
// slot j is <R_{n-1-r j} q, K'_c>: a key is rotated once per call, and the query once per parent.
#pragma once

#include <cstdint>

#include "host/cpu/simd_prelude.h"
#include "ops/tree/tree_args.h"

namespace htree::tree_attention {

// Sizes in elements. A padded size is a multiple of the table's `lanes`; the padding holds zeros.
struct QueryShape {
  int64_t group = 1;      // G, query heads per key/value head
  int64_t half = 1;       // K/2
  int64_t half_pad = 1;   // a query or key row is [lo: half_pad][hi: half_pad]
  int64_t value_dim = 1;  // V
  int64_t value_pad = 1;
  int64_t r = 16;
  int64_t r_pad = 16;
  int64_t max_parents = 1;  // the most parents that a list can have
  SelectionOptions selection;

  int64_t row() const { return 2 * half_pad; }
  // Elements from a head's scores to the next head's: all candidates, and space for whole
  // vectors past the end.
  int64_t score_stride() const { return max_parents * r + r_pad; }
};

// One layer of one (batch, key/value head). The forward pass reads the first two arrays, the
// gradients the last two.
template <typename Real>
struct PackedLayer {
  const Real* keys = nullptr;         // [num_parents][K][r_pad]: K' of a parent's children side by side
  const Real* values = nullptr;       // [num_nodes][value_pad]
  const Real* key_rows = nullptr;     // [num_nodes][2 half_pad]: K'
  const Real* value_lanes = nullptr;  // [num_parents][V][r_pad]
  int64_t num_nodes = 0;
};

// The span means of one layer of one (batch, key/value head), docs/semantics/tree_attention.md §1.15. Mean m
// of a node is rotated as the node's key is, and stands in tile m of the node's parent.
template <typename Real>
struct PackedSpan {
  const Real* keys = nullptr;  // [num_parents][tiles][K][lanes], a parent's children side by side
  int64_t num_nodes = 0;       // of the layer
  int64_t num_means = 0;       // ceil(T / selection_span)
  int64_t means_per_node = 0;
  int64_t tiles = 0;  // min(means_per_node, num_means)
  int64_t lanes = 0;  // r_pad, or fewer where the layer has fewer than r nodes
};

// cos and sin [positions][half_pad]; null: no rotation.
template <typename Real>
struct Rotation {
  const Real* cos = nullptr;
  const Real* sin = nullptr;
};

// What one query meets in one layer. `regular`: the list keeps the invariant of
// docs/semantics/tree_attention.md §1.3, so that every candidate is present. Otherwise each one is checked.
struct Candidates {
  const int32_t* parents = nullptr;  // [num_parents]
  int64_t num_parents = 0;
  int64_t rightmost = 0;
  int64_t count = 0;
  bool regular = true;
};

// max [G], sum [G], out [G][value_pad]
template <typename Real>
struct QueryState {
  Real* max;
  Real* sum;
  Real* out;
};

// The candidates that a query merges, in ascending order of position.
struct RowList {
  int32_t* positions;  // [max_parents r]
  int32_t* nodes;      // [max_parents r]
  int64_t count = 0;
};

// A query that has a certain parent in its list, for the gradients of the parent's children.
template <typename Real>
struct ParentUse {
  const Real* weights;  // P for the parent's first child; the next head's stands score_stride further on
  const Real* dscores;  // the same for dS
  const Real* q;        // [G][row], scaled, not rotated
  const Real* dout;     // [G][value_pad]
  int64_t position;     // rotation of the query relative to the parent's first child: n-1 - r slot
  bool finite;          // all of q and dout are finite
};

template <typename Real>
struct QueryKernels {
  int64_t lanes;
  // Writes scores [G][score_stride] of all candidates; absent ones and the rest of the last vector get -inf.
  // q [G][row] holds the scaled query before its rotation, `rotated` [G][row] is scratch.
  void (*score)(const QueryShape&, const PackedLayer<Real>&, const Rotation<Real>&, const Candidates&,
                const Real* q, Real* rotated, Real* scores);
  // Writes for each candidate before the rightmost one the maximum of the scores of its span means, and the
  // sum of exp(score - maximum), both [G][score_stride]. A NaN score makes the maximum NaN.
  void (*score_span)(const QueryShape&, const PackedSpan<Real>&, const Rotation<Real>&, const Candidates&,
                     const Real* q, Real* rotated, Real* maxima, Real* sums);
  // Writes the min(top_k, count) positions that the key of §1.6 selects, ascending, and returns their number.
  // `sums` is what score_span wrote, or null.
  int64_t (*select)(const QueryShape&, const Candidates&, const Real* scores, const Real* sums, int64_t top_k,
                    void* workspace, int32_t* positions);
  int64_t (*select_workspace_bytes)(int64_t max_candidates);
  // Merges the softmax over all candidates except the `excluded` positions (ascending) into the state.
  // Overwrites the scores. `partial` [G][value_pad] is scratch.
  void (*accumulate)(const QueryShape&, const PackedLayer<Real>&, const Candidates&, const int32_t* excluded,
                     int64_t num_excluded, Real* scores, RowList rows, Real* partial, QueryState<Real> state);

  // ---- gradients, docs/semantics/tree_attention.md §1.10

  // Overwrites scores by P = exp(s - gmax) / gsum, 0 for absent and excluded candidates, and dscores, unless
  // null, by P (dout V^T - delta). dout [G][value_pad]; delta, gmax, gsum [G].
  void (*weigh)(const QueryShape&, const PackedLayer<Real>&, const Candidates&, const int32_t* excluded,
                int64_t num_excluded, const Real* dout, const Real* delta, const Real* gmax, const Real* gsum,
                Real* scores, Real* dscores);
  // dq [G][row] += R^-1 (sum of dS K'). `partial` [G][row] is scratch.
  void (*query_gradient)(const QueryShape&, const PackedLayer<Real>&, const Rotation<Real>&,
                         const Candidates&, const int32_t* excluded, int64_t num_excluded,
                         const Real* dscores, RowList rows, Real* partial, Real* dq);
  // Adds to the gradients of K' [num_children][row] and of V [num_children][value_pad] of one parent's
  // children, in the order of `uses`; either may be null. `rotated` [kParentUses][G][row] is scratch; 0 <=
  // count <= kParentUses.
  void (*node_gradients)(const QueryShape&, const Rotation<Real>&, const ParentUse<Real>* uses, int64_t count,
                         int64_t num_children, Real* rotated, Real* dkeys, Real* dvalues);
};

// Uses of a parent that one call of node_gradients takes.
constexpr int64_t kParentUses = 16;

extern const QueryKernels<float> kQueryKernelsBaseline;
extern const QueryKernels<float> kQueryKernelsAvx2;
extern const QueryKernels<float> kQueryKernelsAvx512;
extern const QueryKernels<double> kQueryKernelsDouble;

}  // namespace htree::tree_attention
