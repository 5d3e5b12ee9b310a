// Dot products of rows with rows. Vectors lie along the rows, so that row-major weights are read as they are,
// without a copy or a transposition. Include it after host/cpu/simd.h.
//
// Accuracy: a lane takes kChain steps in fp32, one addition folds a vector to half as many lanes, and from
// there on sums are fp64. So at any depth no more than kChain + 1 roundings to fp32 lie between a product and
// its sum. The order of a sum depends on the depth alone, not on other rows and columns, nor on threads.
#pragma once

#include "host/cpu/row_products.h"
#include "host/cpu/simd.h"

namespace htree::HTREE_ISA {

// A tile keeps kTileRows * kTileColumns vectors of sums in registers, beside its rows and one column.
#if HTREE_LANES == 16
constexpr int kTileRows = 4;
constexpr int kTileColumns = 6;
#elif HTREE_LANES == 8
constexpr int kTileRows = 3;
constexpr int kTileColumns = 4;
#else
constexpr int kTileRows = 2;
constexpr int kTileColumns = 4;
#endif

typedef float VecHalf __attribute__((vector_size(2 * HTREE_LANES)));

inline VecD fold(VecF x) {
  VecHalf halves[2];
  std::memcpy(halves, &x, sizeof x);
  const VecHalf sum = halves[0] + halves[1];
#if HTREE_LANES == 16
  return (VecD)_mm512_cvtps_pd((__m256)sum);  // GCC 12 makes four instructions of convertvector
#else
  return __builtin_convertvector(sum, VecD);
#endif
}

template <int kBytes>
struct Doubles {
  typedef double Vec __attribute__((vector_size(kBytes)));
};

// Adds halves, which stay in registers.
template <typename V>
inline double sum_lanes(V x) {
  if constexpr (sizeof(V) == 16) {
    return x[0] + x[1];
  } else {
    typename Doubles<sizeof(V) / 2>::Vec halves[2];
    std::memcpy(halves, &x, sizeof x);
    return sum_lanes(halves[0] + halves[1]);
  }
}

// How a step reads its rows and columns and adds their products. This one takes fp32 rows, and columns of any
// type that has load() and load_partial().
template <typename W>
struct FloatStep {
  using Row = float;
  using Column = W;
  static constexpr int kElements = kLanes;
  static VecF row(const float* x) { return load(x); }
  static VecF column(const W* w) { return load(w); }
  static VecF column(const W* w, int count) { return load_partial(w, count, 0.0f); }
  static VecF add(VecF sum, VecF row, VecF column) { return sum + row * column; }
};

// How many groups of columns lie between the one in use and the one that is being fetched from memory.
// Without it several rows of weights side by side come at half the speed of one: the hardware's prefetchers
// follow one run of addresses per page.
constexpr int kGroupsAhead = 2;

// Fetches into the second-level cache. Past the end of the weights it has no effect, so the
// address is no pointer.
template <typename T>
inline void prefetch(const T* p, int64_t ahead) {
  const auto address = reinterpret_cast<uintptr_t>(p) + static_cast<uintptr_t>(ahead) * sizeof(T);
  __builtin_prefetch(reinterpret_cast<const void*>(address), 0, 2);
}

// totals += the products of `steps` steps from element `first` on. Meanwhile it fetches the elements of w
// that stand `ahead` further on.
template <class Step, bool kPrefetch, int R, int C>
inline void add_chain(const typename Step::Row* const (&x)[R], const typename Step::Column* const (&w)[C],
                      int64_t first, int64_t steps, int64_t ahead, VecD (&totals)[R][C]) {
  VecF sums[R][C] = {};
  for (int64_t i = first; i < first + steps * Step::kElements; i += Step::kElements) {
    decltype(Step::row(x[0])) rows[R];
    for (int r = 0; r < R; ++r) {
      rows[r] = Step::row(x[r] + i);
    }
    for (int c = 0; c < C; ++c) {
      const auto column = Step::column(w[c] + i);
      if constexpr (kPrefetch) {
        prefetch(w[c] + i, ahead);
      }
      for (int r = 0; r < R; ++r) {
        sums[r][c] = Step::add(sums[r][c], rows[r], column);
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < C; ++c) {
      totals[r][c] += fold(sums[r][c]);
    }
  }
}

// The last elements of rows whose depth is not a multiple of a step.
template <class Step, int R, int C>
inline void add_rest(const typename Step::Row* const (&x)[R], const typename Step::Column* const (&w)[C],
                     int64_t first, int count, VecD (&totals)[R][C]) {
  for (int c = 0; c < C; ++c) {
    const auto column = Step::column(w[c] + first, count);
    for (int r = 0; r < R; ++r) {
      totals[r][c] += fold(Step::add(VecF{}, Step::row(x[r] + first), column));
    }
  }
}

// Sums of R rows from `row` on and C columns from `column` on. Beyond the last row or column it takes the
// last one again, and does not store the result.
template <class Step, int kChain, int R, int C, bool kPrefetch, typename S>
void multiply_tile(const RowProducts<typename Step::Row, typename Step::Column, S>& p, int64_t row,
                   int64_t column) {
  const typename Step::Row* x[R];
  for (int r = 0; r < R; ++r) {
    x[r] = p.x + (row + r < p.rows ? row + r : p.rows - 1) * p.x_stride;
  }
  const typename Step::Column* w[C];
  for (int c = 0; c < C; ++c) {
    w[c] = p.w + (column + c < p.columns ? column + c : p.columns - 1) * p.w_stride;
  }
  VecD totals[R][C] = {};
  const int64_t steps = p.depth / Step::kElements;
  const int64_t ahead = kGroupsAhead * C * p.w_stride;
  for (int64_t step = 0; step < steps; step += kChain) {
    const int64_t count = kChain < steps - step ? kChain : steps - step;
    add_chain<Step, kPrefetch>(x, w, step * Step::kElements, count, ahead, totals);
  }
  if (const int64_t rest = p.depth % Step::kElements; rest != 0) {
    add_rest<Step>(x, w, steps * Step::kElements, static_cast<int>(rest), totals);
  }
  for (int r = 0; r < R && row + r < p.rows; ++r) {
    for (int c = 0; c < C && column + c < p.columns; ++c) {
      p.sums[(row + r) * p.sums_stride + column + c] = static_cast<S>(sum_lanes(totals[r][c]));
    }
  }
}

// The tile at (row, column) with up to kTileRows rows. Returns how many it had.
template <class Step, int kChain, bool kPrefetch, typename S>
int64_t multiply_next(const RowProducts<typename Step::Row, typename Step::Column, S>& p, int64_t row,
                      int64_t column) {
  const int64_t left = p.rows - row;
  if (left == 1) {
    multiply_tile<Step, kChain, 1, kTileColumns, kPrefetch>(p, row, column);
    return 1;
  }
  if (left == 2) {
    multiply_tile<Step, kChain, 2, kTileColumns, kPrefetch>(p, row, column);
    return 2;
  }
  multiply_tile<Step, kChain, kTileRows, kTileColumns, kPrefetch>(p, row, column);
  return kTileRows;
}

// All sums of p. The outer loop goes over groups of columns: each comes from memory once and
// then from the cache.
template <class Step, int kChain, typename S>
void multiply_rows(const RowProducts<typename Step::Row, typename Step::Column, S>& p) {
  for (int64_t column = 0; column < p.columns; column += kTileColumns) {
    int64_t row = multiply_next<Step, kChain, true>(p, 0, column);
    while (row < p.rows) {
      row += multiply_next<Step, kChain, false>(p, row, column);
    }
  }
}

// to[i] = from[i] in fp32, then zeros up to `width` elements.
template <typename T>
void widen_row(const T* from, int64_t count, float* to, int64_t width) {
  for_vectors<T>(count,
                 [&](int64_t i, auto lanes) { store_lanes(to + i, load_lanes(from + i, lanes), lanes); });
  std::memset(to + count, 0, sizeof(float) * static_cast<size_t>(width - count));
}

}  // namespace htree::HTREE_ISA
