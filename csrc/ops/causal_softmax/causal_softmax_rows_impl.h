// The CPU row kernels of causal_softmax_rows.h, compiled per instruction
// set after host/cpu/simd.h (csrc/instances.py).
#pragma once

#include "ops/causal_softmax/causal_softmax_rows.h"

namespace htree::HTREE_ISA {

// Independent accumulators hide the latency of max and add.
constexpr int kChains = 4;

template <typename T>
inline ScalarOf<T> row_max(const T* x, int64_t n) {
  using Vec = VecOf<T>;
  constexpr int64_t kStep = kLanesOf<Vec>;
  const ScalarOf<T> lowest = -std::numeric_limits<ScalarOf<T>>::infinity();
  Vec best[kChains] = {splat(lowest), splat(lowest), splat(lowest), splat(lowest)};
  int64_t i = 0;
  for (; i + kChains * kStep <= n; i += kChains * kStep) {
    for (int c = 0; c < kChains; ++c) {
      best[c] = max(load(x + i + c * kStep), best[c]);
    }
  }
  for (; i + kStep <= n; i += kStep) {
    best[0] = max(load(x + i), best[0]);
  }
  if (i < n) {
    best[0] = max(load_partial(x + i, static_cast<int>(n - i), lowest), best[0]);
  }
  return horizontal_max(max(max(best[0], best[1]), max(best[2], best[3])));
}

// e[i] = exp(x[i] - m); returns the sum. The sum is NaN for a NaN or +Inf score and for a row of -Inf alone.
template <typename T>
inline ScalarOf<T> row_exp(const T* x, ScalarOf<T> m, ScalarOf<T>* e, int64_t n) {
  using Vec = VecOf<T>;
  constexpr int64_t kStep = kLanesOf<Vec>;
  Vec sum[kChains] = {};
  const Vec shift = splat(m);
  int64_t i = 0;
  for (; i + kChains * kStep <= n; i += kChains * kStep) {
    for (int c = 0; c < kChains; ++c) {
      const Vec value = exp(load(x + i + c * kStep) - shift);
      store(e + i + c * kStep, value);
      sum[c] += value;
    }
  }
  for (; i + kStep <= n; i += kStep) {
    const Vec value = exp(load(x + i) - shift);
    store(e + i, value);
    sum[0] += value;
  }
  ScalarOf<T> total = horizontal_sum((sum[0] + sum[1]) + (sum[2] + sum[3]));
  if (i < n) {
    const int count = static_cast<int>(n - i);
    const Vec value = exp(load_partial(x + i, count, m) - shift);
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
void forward_row(const T* x, T* y, int64_t visible, int64_t cols, void* scratch) {
  using Vec = VecOf<T>;
  constexpr int64_t kStep = kLanesOf<Vec>;
  auto* e = static_cast<ScalarOf<T>*>(scratch);
  const Vec scale = splat(1 / row_exp(x, row_max(x, visible), e, visible));
  int64_t i = 0;
  for (; i + kStep <= visible; i += kStep) {
    store(y + i, load(e + i) * scale);
  }
  if (i < visible) {
    const int count = static_cast<int>(visible - i);
    store_partial(y + i, load_partial(e + i, count, 0) * scale, count);
  }
  fill_zero(y + visible, cols - visible);
}

template <typename T>
void backward_row(const T* dy, const T* y, T* dx, int64_t visible, int64_t cols) {
  using Vec = VecOf<T>;
  constexpr int64_t kStep = kLanesOf<Vec>;
  Vec sum[kChains] = {};
  int64_t i = 0;
  for (; i + kChains * kStep <= visible; i += kChains * kStep) {
    for (int c = 0; c < kChains; ++c) {
      sum[c] += load(dy + i + c * kStep) * load(y + i + c * kStep);
    }
  }
  for (; i + kStep <= visible; i += kStep) {
    sum[0] += load(dy + i) * load(y + i);
  }
  if (i < visible) {
    const int count = static_cast<int>(visible - i);
    sum[1] += load_partial(dy + i, count, 0) * load_partial(y + i, count, 0);
  }
  const Vec dot = splat(horizontal_sum((sum[0] + sum[1]) + (sum[2] + sum[3])));
  for (i = 0; i + kStep <= visible; i += kStep) {
    store(dx + i, load(y + i) * (load(dy + i) - dot));
  }
  if (i < visible) {
    const int count = static_cast<int>(visible - i);
    store_partial(dx + i, load_partial(y + i, count, 0) * (load_partial(dy + i, count, 0) - dot), count);
  }
  fill_zero(dx + visible, cols - visible);
}

constexpr causal_softmax::RowKernels row_kernels() {
  return {{forward_row<float>, backward_row<float>},
          {forward_row<Fp16>, backward_row<Fp16>},
          {forward_row<Bf16>, backward_row<Bf16>},
          {forward_row<double>, backward_row<double>}};
}

}  // namespace htree::HTREE_ISA
