// The CPU row kernels of rmsnorm_rope_rows.h, compiled per instruction
// set after host/cpu/simd.h (csrc/instances.py).
#pragma once

#include "host/cpu/simd.h"
#include "ops/rmsnorm_rope/rmsnorm_rope_rows.h"

namespace htree::HTREE_ISA {

using rmsnorm_rope::RowShape;
using rmsnorm_rope::TableRow;

// Independent accumulators hide the latency of multiply-add.
constexpr int kChains = 4;

template <typename T>
inline ScalarOf<T> sum_of_squares(const T* x, int64_t n) {
  using Vec = VecOf<T>;
  constexpr int64_t kStep = kLanesOf<Vec>;
  Vec sum[kChains] = {};
  int64_t i = 0;
  for (; i + kChains * kStep <= n; i += kChains * kStep) {
    for (int c = 0; c < kChains; ++c) {
      const Vec value = load(x + i + c * kStep);
      sum[c] += value * value;
    }
  }
  for_vectors<T>(n - i, [&](int64_t at, auto lanes) {
    const Vec value = load_lanes(x + i + at, lanes);
    sum[0] += value * value;
  });
  return horizontal_sum((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

template <typename T>
void forward_row(const T* x, T* y, const RowShape<ScalarOf<T>>& shape, const TableRow<ScalarOf<T>>& tables) {
  using A = ScalarOf<T>;
  using Vec = VecOf<T>;
  const int64_t half = shape.head_dim / 2;
  const int64_t width = shape.num_heads * shape.head_dim;
  const Vec scale = splat(1 / std::sqrt(sum_of_squares(x, width) / static_cast<A>(width) + shape.eps));
  for (int64_t head = 0; head < shape.num_heads; ++head) {
    const int64_t lower = head * shape.head_dim;
    const int64_t upper = lower + half;
    for_vectors<T>(half, [&](int64_t i, auto lanes) {
      const Vec a = load_lanes(x + lower + i, lanes) * scale * load_lanes(shape.weight + lower + i, lanes);
      const Vec b = load_lanes(x + upper + i, lanes) * scale * load_lanes(shape.weight + upper + i, lanes);
      store_lanes(y + lower + i,
                  a * load_lanes(tables.cos_lower + i, lanes) - b * load_lanes(tables.sin_lower + i, lanes),
                  lanes);
      store_lanes(y + upper + i,
                  b * load_lanes(tables.cos_upper + i, lanes) + a * load_lanes(tables.sin_upper + i, lanes),
                  lanes);
    });
  }
}

template <typename T>
void backward_row(const T* dy, const T* x, T* dx, ScalarOf<T>* dw, const RowShape<ScalarOf<T>>& shape,
                  const TableRow<ScalarOf<T>>& tables, ScalarOf<T>* scratch) {
  using A = ScalarOf<T>;
  using Vec = VecOf<T>;
  const int64_t half = shape.head_dim / 2;
  const int64_t width = shape.num_heads * shape.head_dim;
  // dn goes to the scratch row; dot = sum of dn w x.
  Vec dot_lower = {};
  Vec dot_upper = {};
  for (int64_t head = 0; head < shape.num_heads; ++head) {
    const int64_t lower = head * shape.head_dim;
    const int64_t upper = lower + half;
    for_vectors<T>(half, [&](int64_t i, auto lanes) {
      const Vec a = load_lanes(dy + lower + i, lanes);
      const Vec b = load_lanes(dy + upper + i, lanes);
      const Vec dn_lower =
          a * load_lanes(tables.cos_lower + i, lanes) + b * load_lanes(tables.sin_upper + i, lanes);
      const Vec dn_upper =
          b * load_lanes(tables.cos_upper + i, lanes) - a * load_lanes(tables.sin_lower + i, lanes);
      store_lanes(scratch + lower + i, dn_lower, lanes);
      store_lanes(scratch + upper + i, dn_upper, lanes);
      dot_lower += dn_lower * load_lanes(shape.weight + lower + i, lanes) * load_lanes(x + lower + i, lanes);
      dot_upper += dn_upper * load_lanes(shape.weight + upper + i, lanes) * load_lanes(x + upper + i, lanes);
    });
  }
  const A count = static_cast<A>(width);
  const A r = 1 / std::sqrt(sum_of_squares(x, width) / count + shape.eps);
  const Vec scale = splat(r);
  const Vec shrink = splat(horizontal_sum(dot_lower + dot_upper) * r / count * r * r);
  for_vectors<T>(width, [&](int64_t i, auto lanes) {
    const Vec value = load_lanes(x + i, lanes);
    const Vec dn = load_lanes(scratch + i, lanes);
    if (dx != nullptr) {
      store_lanes(dx + i, dn * load_lanes(shape.weight + i, lanes) * scale - value * shrink, lanes);
    }
    if (dw != nullptr) {
      store_lanes(dw + i, load_lanes(dw + i, lanes) + dn * (value * scale), lanes);
    }
  });
}

constexpr rmsnorm_rope::RowKernels row_kernels() {
  return {{forward_row<float>, backward_row<float>},
          {forward_row<Fp16>, backward_row<Fp16>},
          {forward_row<Bf16>, backward_row<Bf16>},
          {forward_row<double>, backward_row<double>}};
}

}  // namespace htree::HTREE_ISA
