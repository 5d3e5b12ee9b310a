// Body of the query kernels; included by the query_kernels_*.cpp files after host/cpu/simd.h.
#pragma once

#include "ops/tree_attention/cpu/query_blocks.h"
#include "ops/tree_attention/cpu/query_gradients_impl.h"
#include "ops/tree_attention/cpu/stages/selection.h"

namespace htree::HTREE_ISA::query {

template <typename Real>
void score(const QueryShape& shape, const PackedLayer<Real>& layer, const Rotation<Real>& rotation,
           const Candidates& candidates, const Real* q, Real* rotated, Real* scores) {
  const int64_t stride = shape.score_stride();
  const int64_t tile_size = 2 * shape.half * shape.r_pad;
  for (int64_t slot = 0; slot < candidates.num_parents; ++slot) {
    const int64_t parent = candidates.parents[slot];
    Real* out = scores + slot * shape.r;
    if (!candidates.regular && !parent_present(shape, layer.num_nodes, parent)) {
      for (int64_t g = 0; g < shape.group; ++g) {
        fill(out + g * stride, shape.r, -kInfinity<Real>);
      }
      continue;
    }
    const Real* row = q;
    if (rotation.cos != nullptr) {
      rotate(shape, rotation, candidates.count - 1 - slot * shape.r, q, rotated, Real{1});
      row = rotated;
    }
    const Real* tile = layer.keys + parent * tile_size;
    const bool last = slot + 1 == candidates.num_parents || !candidates.regular;
    const Real* next = last ? tile : layer.keys + candidates.parents[slot + 1] * tile_size;
    for_blocks<kHeadBlock>(shape.group, [&](auto heads, int64_t g) {
      // A vector reaches past the r children into the next slot, which is written after this one.
      for (int64_t lane = 0; lane < shape.r_pad; lane += kLanesOf<VecOf<Real>>) {
        dot_children<heads.value>(tile + lane, shape.r_pad, row + g * shape.row(), shape.row(), shape.half,
                                  shape.half, shape.half_pad, next + lane, out + g * stride + lane, stride);
      }
    });
    for (int64_t child = 0; !candidates.regular && child < shape.r; ++child) {
      if (!node_present(parent * shape.r + child, candidates.rightmost, layer.num_nodes)) {
        for (int64_t g = 0; g < shape.group; ++g) {
          out[g * stride + child] = -kInfinity<Real>;
        }
      }
    }
  }
  for (int64_t g = 0; g < shape.group; ++g) {
    fill(scores + g * stride + candidates.count,
         candidates.num_parents * shape.r + shape.r_pad - candidates.count, -kInfinity<Real>);
  }
}

template <typename Real>
int64_t select(const QueryShape& shape, const Candidates& candidates, const Real* scores, int64_t top_k,
               void* workspace, int32_t* positions) {
  selection::Workspace<Real> scratch(workspace, shape.max_parents * shape.r);
  return selection::select_row(scores, shape.score_stride(), shape.group, candidates.count, top_k,
                               shape.importance, scratch, positions);
}

// scores[p] = exp(scores[p] - max) over `count` rounded up to vectors; returns the maximum (NaN skipped) and
// the sum.
template <typename Real>
inline void exponentiate(Real* scores, int64_t count, Real& max_out, Real& sum_out) {
  constexpr int width = kLanesOf<VecOf<Real>>;
  VecOf<Real> best = splat(-kInfinity<Real>);
  for (int64_t p = 0; p < count; p += width) {
    const VecOf<Real> x = load(scores + p);
    best = x > best ? x : best;
  }
  Real top = -kInfinity<Real>;
  for (int i = 0; i < width; ++i) {
    top = best[i] > top ? best[i] : top;
  }
  const VecOf<Real> shift = splat(top == -kInfinity<Real> ? Real{0} : top);
  VecOf<Real> sum[2] = {};
  int64_t p = 0;
  for (; p + 2 * width <= count; p += 2 * width) {
    for (int c = 0; c < 2; ++c) {
      const VecOf<Real> e = exp(load(scores + p + c * width) - shift);
      store(scores + p + c * width, e);
      sum[c] += e;
    }
  }
  for (; p < count; p += width) {
    const VecOf<Real> e = exp(load(scores + p) - shift);
    store(scores + p, e);
    sum[0] += e;
  }
  max_out = top;
  sum_out = horizontal_sum(sum[0] + sum[1]);
}

// docs/semantics/tree_attention.md §1.7 with its guard: a state of sum 0 weighs nothing, whatever its
// maximum.
template <typename Real>
inline void merge_head(Real max, Real sum, const Real* out, int64_t size, Real& total_max, Real& total_sum,
                       Real* total_out) {
  if (sum == 0) {
    return;
  }
  const Real top = max > total_max ? max : total_max;
  const Real base = top == -kInfinity<Real> ? Real{0} : top;
  const Real keep = total_sum == 0 ? Real{0} : exp(splat(total_max - base))[0];
  const Real add = exp(splat(max - base))[0];
  total_max = top;
  total_sum = total_sum * keep + sum * add;
  for (int64_t v = 0; v < size; v += kLanesOf<VecOf<Real>>) {
    store(total_out + v, load(total_out + v) * keep + load(out + v) * add);
  }
}

template <typename Real>
void accumulate(const QueryShape& shape, const PackedLayer<Real>& layer, const Candidates& candidates,
                const int32_t* excluded, int64_t num_excluded, Real* scores, RowList rows, Real* partial,
                QueryState<Real> state) {
  const int64_t stride = shape.score_stride();
  list_rows(shape, layer.num_nodes, candidates, excluded, num_excluded, rows);
  if (rows.count == 0) {
    return;
  }
  Real maxima[kHeadBlock];
  Real sums[kHeadBlock];
  for (int64_t first = 0; first < shape.group; first += kHeadBlock) {
    const int64_t heads = shape.group - first < kHeadBlock ? shape.group - first : kHeadBlock;
    Real* block = scores + first * stride;
    for (int64_t g = 0; g < heads; ++g) {
      for (int64_t e = 0; e < num_excluded; ++e) {
        block[g * stride + excluded[e]] = -kInfinity<Real>;
      }
      exponentiate(block + g * stride, candidates.count, maxima[g], sums[g]);
    }
    Real* out = partial + first * shape.value_pad;
    fill(out, heads * shape.value_pad, Real{0});
    add_rows(rows, heads, block, stride, layer.values, shape.value_pad, out);
    for (int64_t g = 0; g < heads; ++g) {
      merge_head(maxima[g], sums[g], out + g * shape.value_pad, shape.value_pad, state.max[first + g],
                 state.sum[first + g], state.out + (first + g) * shape.value_pad);
    }
  }
}

template <typename Real>
constexpr QueryKernels<Real> query_kernels() {
  return {kLanesOf<VecOf<Real>>, score<Real>, select<Real>,         selection::Workspace<Real>::bytes,
          accumulate<Real>,      weigh<Real>, query_gradient<Real>, node_gradients<Real>};
}

}  // namespace htree::HTREE_ISA::query
