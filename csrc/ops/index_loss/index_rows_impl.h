// The loops of index_rows.h, compiled per instruction set after host/cpu/simd.h (csrc/instances.py).
#pragma once

#include "ops/index_loss/index_rows.h"

namespace htree::HTREE_ISA::index_loss_rows {

constexpr int kRows = 4;  // rows that share a key in registers

template <typename T>
void widen(const T* from, int64_t d, ScalarOf<T> factor, ScalarOf<T>* row) {
  for_vectors<T>(d, [&](int64_t i, auto lanes) {
    store_lanes(row + i, load_lanes(from + i, lanes) * splat(factor), lanes);
  });
}

// R rows with one key. The order of a sum depends on d alone.
template <int R, typename T>
void multiply_key(const ScalarOf<T>* rows, const T* key, int64_t d, ScalarOf<T>* products, int64_t stride) {
  VecOf<T> sums[R] = {};
  for_vectors<T>(d, [&](int64_t i, auto lanes) {
    const VecOf<T> values = load_lanes(key + i, lanes);
    for (int r = 0; r < R; ++r) {
      sums[r] += load_lanes(rows + r * d + i, lanes) * values;
    }
  });
  for (int r = 0; r < R; ++r) {
    products[r * stride] = horizontal_sum(sums[r]);
  }
}

template <typename T>
void multiply(const ScalarOf<T>* rows, int64_t num_rows, const T* keys, int64_t key_stride, int64_t count,
              int64_t d, ScalarOf<T>* products, int64_t product_stride) {
  for (int64_t j = 0; j < count; ++j) {
    const T* key = keys + j * key_stride;
    int64_t r = 0;
    for (; r + kRows <= num_rows; r += kRows) {
      multiply_key<kRows>(rows + r * d, key, d, products + r * product_stride + j, product_stride);
    }
    for (; r < num_rows; ++r) {
      multiply_key<1>(rows + r * d, key, d, products + r * product_stride + j, product_stride);
    }
  }
}

template <typename Real>
Real sum_exponentials(const Real* x, int64_t count, Real reference) {
  using Vec = VecOf<Real>;
  constexpr int kWidth = kLanesOf<Vec>;
  Vec sum{};
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    sum += exp(load(x + i) - splat(reference));
  }
  if (i < count) {
    const Vec rest = load_partial(x + i, static_cast<int>(count - i), reference);
    const Vec values = exp(rest - splat(reference));
    Real lanes[kWidth];
    std::memcpy(lanes, &values, sizeof values);
    for (int lane = static_cast<int>(count - i); lane < kWidth; ++lane) {
      lanes[lane] = 0;
    }
    sum += load(lanes);
  }
  return horizontal_sum(sum);
}

template <typename T>
void add_scaled(const T* from, int64_t d, ScalarOf<T> factor, ScalarOf<T>* sums) {
  for_vectors<T>(d, [&](int64_t i, auto lanes) {
    store_lanes(sums + i, load_lanes(sums + i, lanes) + splat(factor) * load_lanes(from + i, lanes), lanes);
  });
}

template <typename T>
void narrow(const ScalarOf<T>* from, int64_t d, T* to) {
  for_vectors<T>(d, [&](int64_t i, auto lanes) { store_lanes(to + i, load_lanes(from + i, lanes), lanes); });
}

template <typename T>
constexpr index_loss::IndexRows<T, ScalarOf<T>> rows_of() {
  return {widen<T>, multiply<T>, sum_exponentials<ScalarOf<T>>, add_scaled<T>, narrow<T>};
}

constexpr index_loss::IndexTables index_tables() {
  return {rows_of<float>(), rows_of<Fp16>(), rows_of<Bf16>(), rows_of<double>()};
}

}  // namespace htree::HTREE_ISA::index_loss_rows
