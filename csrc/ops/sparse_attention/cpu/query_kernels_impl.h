// The query kernels of query_kernels.h. Include it after host/cpu/simd.h, which says
// for which instruction set.
#pragma once

#include "ops/selection/cpu/selection.h"
#include "ops/sparse_attention/cpu/query_kernels.h"
#include "ops/tree/tree_args.h"

namespace htree::HTREE_ISA::query {

using namespace tree_attention;  // the types of query_kernels.h

template <typename Real>
constexpr Real kInfinity = std::numeric_limits<Real>::infinity();

// Query heads that share every key or value vector that is loaded. More heads are done in several blocks.
constexpr int kHeadBlock = 4;
// Value vectors accumulated in registers for kHeadBlock heads: AVX-512 has 32 registers, the others 16.
constexpr int kValueBlock = HTREE_LANES == 16 ? 4 : 2;
// Value rows added in registers before the sums of a block go back to memory.
constexpr int64_t kRowTile = 64;
// How many rows ahead values are requested from memory.
constexpr int64_t kRowsAhead = 16;
constexpr int64_t kCacheLineBytes = 64;

// Calls f(Size<n>, first) over [0, count) in steps of n: `Block` as often as it fits, then 2, then 1.
template <int N>
struct Size {
  static constexpr int value = N;
};
template <int Block, typename F>
inline void for_blocks(int64_t count, F&& f) {
  int64_t first = 0;
  for (; first + Block <= count; first += Block) {
    f(Size<Block>{}, first);
  }
  if constexpr (Block > 2) {
    for (; first + 2 <= count; first += 2) {
      f(Size<2>{}, first);
    }
  }
  if constexpr (Block > 1) {
    for (; first < count; ++first) {
      f(Size<1>{}, first);
    }
  }
}

// out[g] = R_position q[g] for [G][row]; a negative `direction` rotates back.
template <typename Real>
inline void rotate(const QueryShape& shape, const Rotation<Real>& rotation, int64_t position, const Real* q,
                   Real* out, Real direction) {
  constexpr int width = kLanesOf<VecOf<Real>>;
  for (int64_t i = 0; i < shape.half_pad; i += width) {
    const VecOf<Real> c = load(rotation.cos + position * shape.half_pad + i);
    const VecOf<Real> s = load(rotation.sin + position * shape.half_pad + i) * direction;
    for (int64_t g = 0; g < shape.group; ++g) {
      const int64_t at = g * shape.row() + i;
      const VecOf<Real> lo = load(q + at);
      const VecOf<Real> hi = load(q + at + shape.half_pad);
      store(out + at, lo * c - hi * s);
      store(out + at + shape.half_pad, lo * s + hi * c);
    }
  }
}

inline bool parent_present(const QueryShape& shape, int64_t num_nodes, int64_t parent) {
  return parent >= 0 && parent * shape.r < num_nodes;
}

// out[g][lane] = sum over d of rows[g][d] * tile[d][lane], for one vector of children. `tile` is
// [first + second][r_pad]; a row has `first` entries at 0 and `second` entries at `second_at`. `next`
// is requested from memory. Several tiles stand `tile_step` apart, their results `out_step`.
template <int Heads, int Tiles = 1, typename Real>
inline void dot_children(const Real* tile, int64_t r_pad, const Real* rows, int64_t row_stride, int64_t first,
                         int64_t second, int64_t second_at, const Real* next, Real* out, int64_t out_stride,
                         int64_t tile_step = 0, int64_t out_step = 0) {
  VecOf<Real> lo[Tiles][Heads] = {};
  VecOf<Real> hi[Tiles][Heads] = {};
  const Real* rows_hi = rows + second_at;
  for (int64_t i = 0; i < second; ++i) {
    VecOf<Real> a[Tiles];
    VecOf<Real> b[Tiles];
    for (int n = 0; n < Tiles; ++n) {
      const int64_t at = n * tile_step + i * r_pad;
      __builtin_prefetch(next + at);
      __builtin_prefetch(next + at + first * r_pad);
      a[n] = load(tile + at);
      b[n] = load(tile + at + first * r_pad);
    }
    for (int g = 0; g < Heads; ++g) {
      const VecOf<Real> x = splat(rows[g * row_stride + i]);
      const VecOf<Real> y = splat(rows_hi[g * row_stride + i]);
      for (int n = 0; n < Tiles; ++n) {
        lo[n][g] += x * a[n];
        hi[n][g] += y * b[n];
      }
    }
  }
  for (int64_t i = second; i < first; ++i) {  // at most one: the odd entry
    for (int n = 0; n < Tiles; ++n) {
      const VecOf<Real> a = load(tile + n * tile_step + i * r_pad);
      for (int g = 0; g < Heads; ++g) {
        lo[n][g] += splat(rows[g * row_stride + i]) * a;
      }
    }
  }
  for (int n = 0; n < Tiles; ++n) {
    for (int g = 0; g < Heads; ++g) {
      store(out + n * out_step + g * out_stride, lo[n][g] + hi[n][g]);
    }
  }
}

template <typename Real>
inline void fill(Real* p, int64_t count, Real value) {
  for (int64_t i = 0; i < count; ++i) {
    p[i] = value;
  }
}

inline void append_rows(RowList& rows, int64_t position, int64_t node, int64_t count) {
  int32_t* positions = rows.positions + rows.count;
  int32_t* nodes = rows.nodes + rows.count;
  for (int64_t i = 0; i < count; ++i) {
    positions[i] = static_cast<int32_t>(position + i);
    nodes[i] = static_cast<int32_t>(node + i);
  }
  rows.count += count;
}

// Lists the candidates that are present and not among the `excluded` positions (ascending).
inline void list_rows(const QueryShape& shape, int64_t num_nodes, const Candidates& candidates,
                      const int32_t* excluded, int64_t num_excluded, RowList& rows) {
  rows.count = 0;
  int64_t e = 0;
  for (int64_t slot = 0; slot < candidates.num_parents; ++slot) {
    const int64_t begin = slot * shape.r;
    const int64_t left = candidates.count - begin;
    const int64_t end = begin + (left < shape.r ? left : shape.r);
    const int64_t first_node = static_cast<int64_t>(candidates.parents[slot]) * shape.r;
    int64_t position = begin;
    while (position < end) {
      const int64_t stop = e < num_excluded && excluded[e] < end ? excluded[e] : end;
      if (candidates.regular) {
        append_rows(rows, position, first_node + position - begin, stop - position);
      } else {
        for (int64_t p = position; p < stop; ++p) {
          if (node_present(first_node + p - begin, candidates.rightmost, num_nodes)) {
            append_rows(rows, p, first_node + p - begin, 1);
          }
        }
      }
      e += stop < end;
      position = stop + 1;
    }
  }
}

// out[g][v] += sum over rows of weights[g][position] * matrix[node][v], for a block of heads and
// a block of vectors.
template <int Heads, int Vectors, typename Real>
inline void add_rows_block(const Real* weights, int64_t weight_stride, const int32_t* positions,
                           const int32_t* nodes, int64_t count, int64_t num_ahead, const Real* matrix,
                           int64_t matrix_stride, Real* out, int64_t out_stride) {
  constexpr int width = kLanesOf<VecOf<Real>>;
  constexpr int vectors_per_line = kCacheLineBytes / static_cast<int>(sizeof(VecOf<Real>));
  VecOf<Real> sum[Heads][Vectors];
  for (int g = 0; g < Heads; ++g) {
    for (int v = 0; v < Vectors; ++v) {
      sum[g][v] = load(out + g * out_stride + v * width);
    }
  }
  for (int64_t i = 0; i < count; ++i) {
    if (i < num_ahead) {
      const Real* ahead = matrix + nodes[i + kRowsAhead] * matrix_stride;
      for (int v = 0; v < Vectors; v += vectors_per_line) {
        __builtin_prefetch(ahead + v * width);
      }
    }
    const Real* row = matrix + nodes[i] * matrix_stride;
    const Real* weight = weights + positions[i];
    VecOf<Real> x[Vectors];
    for (int v = 0; v < Vectors; ++v) {
      x[v] = load(row + v * width);
    }
    for (int g = 0; g < Heads; ++g) {
      const VecOf<Real> w = splat(weight[g * weight_stride]);
      for (int v = 0; v < Vectors; ++v) {
        sum[g][v] += w * x[v];
      }
    }
  }
  for (int g = 0; g < Heads; ++g) {
    for (int v = 0; v < Vectors; ++v) {
      store(out + g * out_stride + v * width, sum[g][v]);
    }
  }
}

// out [G][row_size] += weights [G][weight_stride] times the listed rows of matrix [nodes][row_size].
template <typename Real>
inline void add_rows(const RowList& rows, int64_t group, const Real* weights, int64_t weight_stride,
                     const Real* matrix, int64_t row_size, Real* out) {
  constexpr int width = kLanesOf<VecOf<Real>>;
  for (int64_t first = 0; first < rows.count; first += kRowTile) {
    const int64_t left = rows.count - first;
    const int64_t count = left < kRowTile ? left : kRowTile;
    for_blocks<kHeadBlock>(group, [&](auto heads, int64_t g) {
      for_blocks<kValueBlock>(row_size / width, [&](auto vectors, int64_t v) {
        add_rows_block<heads.value, vectors.value>(
            weights + g * weight_stride, weight_stride, rows.positions + first, rows.nodes + first, count,
            left - kRowsAhead, matrix + v * width, row_size, out + g * row_size + v * width, row_size);
      });
    });
  }
}

// ---- gradients, docs/semantics/tree_attention.md §1.10

// Children whose gradients are accumulated in registers for kValueBlock vectors.
constexpr int kChildBlock = 4;

template <typename Real>
void weigh(const QueryShape& shape, const PackedLayer<Real>& layer, const Candidates& candidates,
           const int32_t* excluded, int64_t num_excluded, const Real* dout, const Real* delta,
           const Real* gmax, const Real* gsum, Real* scores, Real* dscores) {
  constexpr int width = kLanesOf<VecOf<Real>>;
  const int64_t stride = shape.score_stride();
  const int64_t first = (shape.value_dim + 1) / 2;
  const int64_t tile_size = shape.value_dim * shape.r_pad;
  for (int64_t slot = 0; dscores != nullptr && slot < candidates.num_parents; ++slot) {
    const int64_t parent = candidates.parents[slot];
    Real* out = dscores + slot * shape.r;
    if (!candidates.regular && !parent_present(shape, layer.num_nodes, parent)) {
      for (int64_t g = 0; g < shape.group; ++g) {
        fill(out + g * stride, shape.r, Real{0});
      }
      continue;
    }
    const Real* tile = layer.value_lanes + parent * tile_size;
    const bool last = slot + 1 == candidates.num_parents || !candidates.regular;
    const Real* next = last ? tile : layer.value_lanes + candidates.parents[slot + 1] * tile_size;
    for_blocks<kHeadBlock>(shape.group, [&](auto heads, int64_t g) {
      for (int64_t lane = 0; lane < shape.r_pad; lane += width) {
        dot_children<heads.value>(tile + lane, shape.r_pad, dout + g * shape.value_pad, shape.value_pad,
                                  first, shape.value_dim - first, first, next + lane, out + g * stride + lane,
                                  stride);
      }
    });
  }
  const int64_t end = candidates.num_parents * shape.r;
  for (int64_t g = 0; g < shape.group; ++g) {
    Real* p = scores + g * stride;
    for (int64_t e = 0; e < num_excluded; ++e) {
      p[excluded[e]] = -kInfinity<Real>;
    }
    const Real inverse = Real{1} / gsum[g];
    for (int64_t i = 0; i < end; i += width) {
      const VecOf<Real> weight = exp(load(p + i) - splat(gmax[g])) * inverse;
      store(p + i, weight);
      if (dscores != nullptr) {
        Real* ds = dscores + g * stride + i;
        const VecOf<Real> gradient = weight * (load(ds) - splat(delta[g]));
        // A candidate that is not merged may have a NaN value, which must not matter.
        store(ds, weight == VecOf<Real>{} ? VecOf<Real>{} : gradient);
      }
    }
  }
}

template <typename Real>
void query_gradient(const QueryShape& shape, const PackedLayer<Real>& layer, const Rotation<Real>& rotation,
                    const Candidates& candidates, const int32_t* excluded, int64_t num_excluded,
                    const Real* dscores, RowList rows, Real* partial, Real* dq) {
  constexpr int width = kLanesOf<VecOf<Real>>;
  const int64_t stride = shape.score_stride();
  const int64_t size = shape.group * shape.row();
  list_rows(shape, layer.num_nodes, candidates, excluded, num_excluded, rows);
  if (rotation.cos == nullptr) {
    add_rows(rows, shape.group, dscores, stride, layer.key_rows, shape.row(), dq);
    return;
  }
  int64_t begin = 0;
  for (int64_t slot = 0; slot < candidates.num_parents; ++slot) {
    int64_t end = begin;
    while (end < rows.count && rows.positions[end] < (slot + 1) * shape.r) {
      ++end;
    }
    if (end == begin) continue;
    fill(partial, size, Real{0});
    add_rows(RowList{rows.positions + begin, rows.nodes + begin, end - begin}, shape.group, dscores, stride,
             layer.key_rows, shape.row(), partial);
    rotate(shape, rotation, candidates.count - 1 - slot * shape.r, partial, partial, Real{-1});
    for (int64_t i = 0; i < size; i += width) {
      store(dq + i, load(dq + i) + load(partial + i));
    }
    begin = end;
  }
}

// out[child][v] += sum over rows of weights[row][child] * sources[row][v], for a block of children and a
// block of vectors.
template <int Children, int Vectors, typename Real>
inline void add_outer_block(const Real* const* weights, const Real* const* sources, int64_t count,
                            int64_t child, int64_t at, Real* out, int64_t out_stride) {
  constexpr int width = kLanesOf<VecOf<Real>>;
  VecOf<Real> sum[Children][Vectors];
  for (int c = 0; c < Children; ++c) {
    for (int v = 0; v < Vectors; ++v) {
      sum[c][v] = load(out + c * out_stride + v * width);
    }
  }
  for (int64_t i = 0; i < count; ++i) {
    const Real* weight = weights[i] + child;
    const Real* source = sources[i] + at;
    VecOf<Real> x[Vectors];
    for (int v = 0; v < Vectors; ++v) {
      x[v] = load(source + v * width);
    }
    for (int c = 0; c < Children; ++c) {
      const VecOf<Real> w = splat(weight[c]);
      for (int v = 0; v < Vectors; ++v) {
        sum[c][v] += w * x[v];
      }
    }
  }
  for (int c = 0; c < Children; ++c) {
    for (int v = 0; v < Vectors; ++v) {
      store(out + c * out_stride + v * width, sum[c][v]);
    }
  }
}

template <typename Real>
inline void add_outer(const Real* const* weights, const Real* const* sources, int64_t count,
                      int64_t num_children, int64_t row_size, Real* out) {
  constexpr int width = kLanesOf<VecOf<Real>>;
  for_blocks<kChildBlock>(num_children, [&](auto children, int64_t child) {
    for_blocks<kValueBlock>(row_size / width, [&](auto vectors, int64_t v) {
      add_outer_block<children.value, vectors.value>(weights, sources, count, child, v * width,
                                                     out + child * row_size + v * width, row_size);
    });
  });
}

// The same for one row that holds NaN or Inf: a child whose weight is 0 gets nothing.
template <typename Real>
inline void add_outer_careful(const Real* weights, const Real* source, int64_t num_children, int64_t row_size,
                              Real* out) {
  for (int64_t child = 0; child < num_children; ++child) {
    for (int64_t i = 0; weights[child] != 0 && i < row_size; ++i) {
      out[child * row_size + i] += weights[child] * source[i];
    }
  }
}

template <typename Real>
void node_gradients(const QueryShape& shape, const Rotation<Real>& rotation, const ParentUse<Real>* uses,
                    int64_t count, int64_t num_children, Real* rotated, Real* dkeys, Real* dvalues) {
  const int64_t stride = shape.score_stride();
  const int64_t size = shape.group * shape.row();
  bool finite = true;
  for (int64_t u = 0; u < count; ++u) {
    finite &= uses[u].finite;
    if (dkeys != nullptr && rotation.cos != nullptr) {
      rotate(shape, rotation, uses[u].position, uses[u].q, rotated + u * size, Real{1});
    }
  }
  const Real* weights[kParentUses * kHeadBlock];
  const Real* dscores[kParentUses * kHeadBlock];
  const Real* queries[kParentUses * kHeadBlock];
  const Real* douts[kParentUses * kHeadBlock];
  for (int64_t first = 0; first < shape.group; first += kHeadBlock) {
    const int64_t heads = shape.group - first < kHeadBlock ? shape.group - first : kHeadBlock;
    int64_t rows = 0;
    for (int64_t u = 0; u < count; ++u) {
      const Real* q = rotation.cos != nullptr ? rotated + u * size : uses[u].q;
      for (int64_t g = first; g < first + heads; ++g, ++rows) {
        weights[rows] = uses[u].weights + g * stride;
        dscores[rows] = uses[u].dscores + g * stride;
        queries[rows] = q + g * shape.row();
        douts[rows] = uses[u].dout + g * shape.value_pad;
      }
    }
    if (finite) {
      if (dkeys != nullptr) add_outer(dscores, queries, rows, num_children, shape.row(), dkeys);
      if (dvalues != nullptr) add_outer(weights, douts, rows, num_children, shape.value_pad, dvalues);
      continue;
    }
    for (int64_t i = 0; i < rows; ++i) {
      if (dkeys != nullptr) add_outer_careful(dscores[i], queries[i], num_children, shape.row(), dkeys);
      if (dvalues != nullptr) add_outer_careful(weights[i], douts[i], num_children, shape.value_pad, dvalues);
    }
  }
}

// ---- the kernels of the table

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

// ---- span means: docs/semantics/tree_attention.md §1.15

// The scores of so many means are kept in memory before they are added to the sums.
constexpr int kMeanBlock = 8;
// How many tiles share each loaded query value: only AVX-512 has registers for two.
constexpr int kTileBlock = HTREE_LANES == 16 ? 2 : 1;

// The means of one vector of children of one parent.
template <typename Real>
struct SpanVector {
  const Real* tiles;  // tile 0 at the vector's first lane
  const Real* next;   // what to request from memory while the last tile is read
  int64_t first_node;
  const Real* rows;  // the rotated query of the first of some heads
};

// Sets the scores [count][heads][width] of those means from `first_mean` on that do not exist to -inf.
template <typename Real>
inline void drop_absent(const PackedSpan<Real>& span, const Candidates& candidates,
                        const SpanVector<Real>& at, int64_t first_mean, int64_t count, int64_t heads,
                        Real* scores) {
  constexpr int width = kLanesOf<VecOf<Real>>;
  for (int64_t i = 0; i < width; ++i) {
    const int64_t node = at.first_node + i;
    const bool present = node_present(node, candidates.rightmost, span.num_nodes);
    for (int64_t m = 0; m < count; ++m) {
      if (present && node * span.means_per_node + first_mean + m < span.num_means) continue;
      for (int64_t g = 0; g < heads; ++g) {
        scores[(m * heads + g) * width + i] = -kInfinity<Real>;
      }
    }
  }
}

// Computes maximum and sum of one vector of children for a block of heads; heads are score_stride() apart.
template <int Heads, typename Real>
inline void score_span_vector(const QueryShape& shape, const PackedSpan<Real>& span,
                              const Candidates& candidates, const SpanVector<Real>& at, Real* maxima,
                              Real* sums) {
  using Vec = VecOf<Real>;
  constexpr int width = kLanesOf<Vec>;
  const int64_t tile_size = 2 * shape.half * span.lanes;
  const Vec infinite = splat(kInfinity<Real>);
  Real scores[kMeanBlock * Heads * width];
  Vec top[Heads];
  Vec sum[Heads] = {};
  Vec broken[Heads] = {};  // not 0 where a score is NaN
  for (int g = 0; g < Heads; ++g) {
    top[g] = -infinite;
  }
  for (int64_t first = 0; first < span.tiles; first += kMeanBlock) {
    const int64_t count = span.tiles - first < kMeanBlock ? span.tiles - first : kMeanBlock;
    for_blocks<kTileBlock>(count, [&](auto tiles, int64_t m) {
      const Real* tile = at.tiles + (first + m) * tile_size;
      const Real* next = first + m + tiles.value < span.tiles ? tile + tiles.value * tile_size : at.next;
      dot_children<Heads, tiles.value>(tile, span.lanes, at.rows, shape.row(), shape.half, shape.half,
                                       shape.half_pad, next, scores + m * Heads * width, width, tile_size,
                                       Heads * width);
    });
    if (!candidates.regular) drop_absent(span, candidates, at, first, count, Heads, scores);
    for (int g = 0; g < Heads; ++g) {
      Vec best = top[g];
      for (int64_t m = 0; m < count; ++m) {
        const Vec score = load(scores + (m * Heads + g) * width);
        best = score > best ? score : best;
      }
      const Vec shift = best == -infinite ? Vec{} : best;
      Vec total = first == 0 ? Vec{} : sum[g] * exp(top[g] - shift);
      for (int64_t m = 0; m < count; ++m) {
        const Vec score = load(scores + (m * Heads + g) * width);
        total += exp(score - shift);
        broken[g] = score == score ? broken[g] : splat(Real{1});
      }
      top[g] = best;
      sum[g] = total;
    }
  }
  for (int g = 0; g < Heads; ++g) {
    // A score of +inf or NaN makes the sum NaN. The sum 1 in its place lets the maximum alone decide, as if
    // it were the node's own score.
    const Vec whole = broken[g] == Vec{} ? sum[g] : splat(Real{1});
    store(sums + g * shape.score_stride(), top[g] == infinite ? splat(Real{1}) : whole);
    store(maxima + g * shape.score_stride(),
          broken[g] == Vec{} ? top[g] : splat(std::numeric_limits<Real>::quiet_NaN()));
  }
}

template <typename Real>
void score_span(const QueryShape& shape, const PackedSpan<Real>& span, const Rotation<Real>& rotation,
                const Candidates& candidates, const Real* q, Real* rotated, Real* maxima, Real* sums) {
  constexpr int width = kLanesOf<VecOf<Real>>;
  const int64_t stride = shape.score_stride();
  const int64_t parent_size = span.tiles * 2 * shape.half * span.lanes;
  // The rightmost candidate gets no score: its means may hold tokens after the query.
  for (int64_t begin = 0, slot = 0; begin < candidates.count - 1; begin += shape.r, ++slot) {
    const int64_t parent = candidates.parents[slot];
    const int64_t left = candidates.count - 1 - begin;
    const int64_t children = left < shape.r ? left : shape.r;
    const bool present = candidates.regular || parent_present(shape, span.num_nodes, parent);
    const int64_t lanes = !present ? 0 : children < span.lanes ? children : span.lanes;
    const Real* row = q;
    if (present && rotation.cos != nullptr) {
      rotate(shape, rotation, candidates.count - 1 - begin, q, rotated, Real{1});
      row = rotated;
    }
    const Real* tiles = span.keys + (present ? parent : 0) * parent_size;
    const bool last = begin + shape.r >= candidates.count - 1 || !candidates.regular;
    const Real* next = last ? tiles : span.keys + candidates.parents[slot + 1] * parent_size;
    for (int64_t lane = 0; lane < lanes; lane += width) {
      for_blocks<kHeadBlock>(shape.group, [&](auto heads, int64_t g) {
        // A vector reaches past the r children into the next slot, which is written after this one.
        const SpanVector<Real> at = {tiles + lane, next + lane, parent * shape.r + lane,
                                     row + g * shape.row()};
        score_span_vector<heads.value>(shape, span, candidates, at, maxima + g * stride + begin + lane,
                                       sums + g * stride + begin + lane);
      });
    }
    for (int64_t g = 0; lanes < children && g < shape.group; ++g) {
      fill(maxima + g * stride + begin + lanes, children - lanes, -kInfinity<Real>);
      fill(sums + g * stride + begin + lanes, children - lanes, Real{0});
    }
  }
}

template <typename Real>
int64_t select(const QueryShape& shape, const Candidates& candidates, const Real* scores, const Real* sums,
               int64_t top_k, void* workspace, int32_t* positions) {
  selection::Workspace<Real> scratch(workspace, shape.max_parents * shape.r);
  return selection::select_row(scores, sums, shape.score_stride(), shape.group, candidates.count, top_k,
                               shape.selection, scratch, positions);
}

// scores[p] = exp(scores[p] - max), `count` rounded up to whole vectors. Returns the maximum, over what is
// not NaN, and the sum.
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

// The merge of docs/semantics/tree_attention.md §1.7 with its guard: a state whose sum is 0 weighs nothing,
// whatever its maximum.
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
  return {kLanesOf<VecOf<Real>>,
          score<Real>,
          score_span<Real>,
          select<Real>,
          selection::Workspace<Real>::bytes,
          accumulate<Real>,
          weigh<Real>,
          query_gradient<Real>,
          node_gradients<Real>};
}

}  // namespace htree::HTREE_ISA::query
