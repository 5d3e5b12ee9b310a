// Body of the CPU row kernels; included by the causal_softmax_rows_*.cpp files after a host/simd_*.h.
#pragma once

#include "ops/causal_softmax/causal_softmax_rows.h"

namespace htree::HTREE_ISA {

// Independent accumulators hide the latency of max and add.
constexpr int kChains = 4;

template <typename T>
inline float row_max(const T* x, int64_t n) {
  VecF best[kChains];
  for (auto& b : best) {
    b = splat(-std::numeric_limits<float>::infinity());
  }
  int64_t i = 0;
  for (; i + kChains * kLanes <= n; i += kChains * kLanes) {
    for (int c = 0; c < kChains; ++c) {
      best[c] = max(load(x + i + c * kLanes), best[c]);
    }
  }
  for (; i + kLanes <= n; i += kLanes) {
    best[0] = max(load(x + i), best[0]);
  }
  if (i < n) {
    best[0] = max(load_partial(x + i, static_cast<int>(n - i), -std::numeric_limits<float>::infinity()), best[0]);
  }
  return horizontal_max(max(max(best[0], best[1]), max(best[2], best[3])));
}

// e[i] = exp(x[i] - m); returns the sum. A NaN or +Inf score, or a row of -Inf only, makes the sum NaN.
template <typename T>
inline float row_exp(const T* x, float m, float* e, int64_t n) {
  VecF sum[kChains] = {};
  const VecF shift = splat(m);
  int64_t i = 0;
  for (; i + kChains * kLanes <= n; i += kChains * kLanes) {
    for (int c = 0; c < kChains; ++c) {
      const VecF value = exp(load(x + i + c * kLanes) - shift);
      store(e + i + c * kLanes, value);
      sum[c] += value;
    }
  }
  for (; i + kLanes <= n; i += kLanes) {
    const VecF value = exp(load(x + i) - shift);
    store(e + i, value);
    sum[0] += value;
  }
  float total = horizontal_sum((sum[0] + sum[1]) + (sum[2] + sum[3]));
  if (i < n) {
    const int count = static_cast<int>(n - i);
    const VecF value = exp(load_partial(x + i, count, m) - shift);
    for (int lane = 0; lane < count; ++lane) {
      e[i + lane] = value[lane];
      total += value[lane];
    }
  }
  return total;
}

template <typename T>
inline void fill_zero(T* y, int64_t n) {
  if (n > 0) {
    std::memset(static_cast<void*>(y), 0, sizeof(T) * static_cast<size_t>(n));
  }
}

template <typename T>
void forward_row(const T* x, T* y, int64_t visible, int64_t cols, float* scratch) {
  const float m = row_max(x, visible);
  const float inverse = 1.0f / row_exp(x, m, scratch, visible);
  const VecF scale = splat(inverse);
  int64_t i = 0;
  for (; i + kLanes <= visible; i += kLanes) {
    store(y + i, load(scratch + i) * scale);
  }
  if (i < visible) {
    const int count = static_cast<int>(visible - i);
    store_partial(y + i, load_partial(scratch + i, count, 0.0f) * scale, count);
  }
  fill_zero(y + visible, cols - visible);
}

template <typename T>
void backward_row(const T* dy, const T* y, T* dx, int64_t visible, int64_t cols) {
  VecF sum[kChains] = {};
  int64_t i = 0;
  for (; i + kChains * kLanes <= visible; i += kChains * kLanes) {
    for (int c = 0; c < kChains; ++c) {
      sum[c] += load(dy + i + c * kLanes) * load(y + i + c * kLanes);
    }
  }
  for (; i + kLanes <= visible; i += kLanes) {
    sum[0] += load(dy + i) * load(y + i);
  }
  if (i < visible) {
    const int count = static_cast<int>(visible - i);
    sum[1] += load_partial(dy + i, count, 0.0f) * load_partial(y + i, count, 0.0f);
  }
  const VecF dot = splat(horizontal_sum((sum[0] + sum[1]) + (sum[2] + sum[3])));
  for (i = 0; i + kLanes <= visible; i += kLanes) {
    store(dx + i, load(y + i) * (load(dy + i) - dot));
  }
  if (i < visible) {
    const int count = static_cast<int>(visible - i);
    store_partial(dx + i, load_partial(y + i, count, 0.0f) * (load_partial(dy + i, count, 0.0f) - dot), count);
  }
  fill_zero(dx + visible, cols - visible);
}

constexpr causal_softmax::RowKernels row_kernels() {
  return {forward_row<float>,  forward_row<Fp16>,  forward_row<Bf16>,
          backward_row<float>, backward_row<Fp16>, backward_row<Bf16>};
}

}  // namespace htree::HTREE_ISA
