// Building blocks of the query kernels; included after host/cpu/simd.h.
#pragma once

#include "ops/tree_attention/candidates.h"
#include "ops/tree_attention/cpu/query_kernels.h"

namespace htree::HTREE_ISA::query {

using namespace tree_attention;  // the contract's types

template <typename Real>
constexpr Real kInfinity = std::numeric_limits<Real>::infinity();

// Heads that share every loaded key or value vector; more are done in blocks.
constexpr int kHeadBlock = 4;
// Value vectors accumulated in registers beside kHeadBlock heads: AVX-512 has 32 registers, the others 16.
constexpr int kValueBlock = HTREE_LANES == 16 ? 4 : 2;
// Rows between two visits of a block's accumulators in memory.
constexpr int64_t kRowTile = 64;
// Rows ahead of the one in use whose values are requested from memory.
constexpr int64_t kRowsAhead = 16;
constexpr int64_t kCacheLineBytes = 64;

// Calls f(std::integral_constant-like tag, first) over [0, count) in blocks of `Block`, then 2, then 1.
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

// out[g] = R_position q[g]; a negative `direction` rotates back. [G][row]
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

// out[g][lane] = sum over d of rows[g][d] * tile[d][lane] for one vector of children: `tile` [first +
// second][r_pad], rows split into two runs of `first` and `second` entries at 0 and at `second_at`. `next` is
// requested from memory.
template <int Heads, typename Real>
inline void dot_children(const Real* tile, int64_t r_pad, const Real* rows, int64_t row_stride, int64_t first,
                         int64_t second, int64_t second_at, const Real* next, Real* out, int64_t out_stride) {
  VecOf<Real> lo[Heads] = {};
  VecOf<Real> hi[Heads] = {};
  const Real* tile_hi = tile + first * r_pad;
  const Real* next_hi = next + first * r_pad;
  const Real* rows_hi = rows + second_at;
  for (int64_t i = 0; i < second; ++i) {
    __builtin_prefetch(next + i * r_pad);
    __builtin_prefetch(next_hi + i * r_pad);
    const VecOf<Real> a = load(tile + i * r_pad);
    const VecOf<Real> b = load(tile_hi + i * r_pad);
    for (int g = 0; g < Heads; ++g) {
      lo[g] += splat(rows[g * row_stride + i]) * a;
      hi[g] += splat(rows_hi[g * row_stride + i]) * b;
    }
  }
  for (int64_t i = second; i < first; ++i) {  // at most one: the odd entry
    const VecOf<Real> a = load(tile + i * r_pad);
    for (int g = 0; g < Heads; ++g) {
      lo[g] += splat(rows[g * row_stride + i]) * a;
    }
  }
  for (int g = 0; g < Heads; ++g) {
    store(out + g * out_stride, lo[g] + hi[g]);
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

// The candidates that are present and not among the `excluded` positions (ascending).
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

// out[g][v] += sum over rows of weights[g][position] * matrix[node][v], for a block of heads and of vectors.
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

}  // namespace htree::HTREE_ISA::query
