// The CPU kernels of quantize_rows.h, compiled per instruction set after host/cpu/simd.h (csrc/instances.py).
// Codes come from integer arithmetic on the bits of floats, a vector at a time.
#pragma once

#include "host/cpu/simd.h"
#include "ops/fp8/e4m3.h"
#include "ops/fp8/e4m3_lanes.h"
#include "ops/fp8/quantize/quantize_rows.h"

namespace htree::HTREE_ISA {

using fp8::RunKernels;
using fp8::RunScale;

constexpr int32_t kFloatInfinity = 0x7f800000;
constexpr int32_t kMagnitude = 0x7fffffff;
constexpr int kChains = 4;  // independent accumulators hide the latency of max

inline VecF scale_lanes(RunScale scale, int64_t i, AllLanes) {
  return scale.stride == 0 ? splat(*scale.data) : load(scale.data + i);
}
inline VecF scale_lanes(RunScale scale, int64_t i, SomeLanes lanes) {
  return scale.stride == 0 ? splat(*scale.data) : load_partial(scale.data + i, lanes.count, 1.0f);
}

// The codes of y, in the low bytes. Magnitudes are capped at 448 first. A normal code keeps the top 3 bits of
// the mantissa, rounded to even by adding half of what is cut off (less one unless the part that is kept is
// odd), and exchanges the exponent's bias 127 for 7. Below 2^-6 a code counts multiples of 2^-9: adding 2^14,
// whose last mantissa bit is 2^-9, rounds to them.
inline VecI encode(VecF y) {
  const VecI bits = as_int(y);
  const VecI sign = (bits >> 24) & 0x80;
  VecI magnitude = bits & kMagnitude;
  const VecI largest = as_int(splat(fp8::kMaxValue));
  const VecI is_nan = magnitude > kFloatInfinity;
  magnitude = magnitude > largest ? largest : magnitude;
  const VecI normal = ((magnitude + 0x7ffff + ((magnitude >> 20) & 1)) >> 20) - (120 << 3);
  const VecI tiny = as_int(as_float(magnitude) + 16384.0f) - as_int(splat(16384.0f));
  const VecI code = magnitude < as_int(splat(0x1p-6f)) ? tiny : normal;
  return is_nan ? (VecI{} + 0x7f) : (code | sign);
}

inline void store_codes(uint8_t* p, VecI code, int count) {
  const VecB bytes = narrow_to_bytes(code);
  std::memcpy(p, &bytes, static_cast<size_t>(count));
}
inline void store_codes(uint8_t* p, VecI code, AllLanes) {
  store_codes(p, code, kLanes);
}
inline void store_codes(uint8_t* p, VecI code, SomeLanes lanes) {
  store_codes(p, code, lanes.count);
}

// The bits of |x| where x is finite, else 0. As integers these order like the magnitudes.
inline VecI finite_bits(VecF x) {
  const VecI bits = as_int(x) & kMagnitude;
  return bits < kFloatInfinity ? bits : VecI{};
}
inline VecI max_bits(VecI a, VecI b) {
  return a > b ? a : b;
}

template <typename T>
float largest(const T* x, int64_t n) {
  VecI best[kChains] = {};
  int64_t i = 0;
  for (; i + kChains * kLanes <= n; i += kChains * kLanes) {
    for (int c = 0; c < kChains; ++c) {
      best[c] = max_bits(best[c], finite_bits(load(x + i + c * kLanes)));
    }
  }
  for_vectors<T>(n - i, [&](int64_t j, auto lanes) {
    best[0] = max_bits(best[0], finite_bits(load_lanes(x + i + j, lanes)));
  });
  const VecI all = max_bits(max_bits(best[0], best[1]), max_bits(best[2], best[3]));
  return horizontal_max(as_float(all));
}

template <typename T>
void fold_largest(const T* x, float* largest, int64_t n) {
  for_vectors<T>(n, [&](int64_t i, auto lanes) {
    const VecI before = as_int(load_lanes(largest + i, lanes));
    store_lanes(largest + i, as_float(max_bits(before, finite_bits(load_lanes(x + i, lanes)))), lanes);
  });
}

// -1 in lanes whose product with the scale is beyond the rounding limit. A NaN is not beyond it, an infinity
// is for every scale.
inline VecI overflows(VecF x, VecF y) {
  const VecI is_beyond = (as_int(y) & kMagnitude) > as_int(splat(fp8::kRoundingLimit));
  const VecI is_nan = (as_int(y) & kMagnitude) > kFloatInfinity;
  return (is_beyond & ~is_nan) | ((as_int(x) & kMagnitude) == kFloatInfinity);
}

template <typename T>
int64_t encode_run(const T* x, RunScale scale, uint8_t* codes, int64_t n) {
  constexpr int64_t kPart = int64_t{1} << 30;  // a lane's counter stays below 2^31
  int64_t total = 0;
  for (int64_t first = 0; first < n; first += kPart) {
    VecI count = {};
    const RunScale part{scale.data + first * scale.stride, scale.stride};
    for_vectors<T>(n - first < kPart ? n - first : kPart, [&](int64_t i, auto lanes) {
      const VecF value = load_lanes(x + first + i, lanes);
      const VecF y = value * scale_lanes(part, i, lanes);
      count -= overflows(value, y);
      store_codes(codes + first + i, encode(y), lanes);
    });
    for (int lane = 0; lane < kLanes; ++lane) {
      total += count[lane];
    }
  }
  return total;
}

template <typename T>
void decode_run(const uint8_t* codes, RunScale scale, T* out, int64_t n) {
  for_vectors<T>(n, [&](int64_t i, auto lanes) {
    store_lanes(out + i, decode(load_codes(codes + i, lanes)) / scale_lanes(scale, i, lanes), lanes);
  });
}

template <typename T>
void round_run(const T* x, RunScale scale, T* y, int64_t n) {
  for_vectors<T>(n, [&](int64_t i, auto lanes) {
    const VecF s = scale_lanes(scale, i, lanes);
    store_lanes(y + i, decode(encode(load_lanes(x + i, lanes) * s)) / s, lanes);
  });
}

template <typename T>
void round_backward_run(const T* dy, const T* x, RunScale scale, T* dx, int64_t n) {
  for_vectors<T>(n, [&](int64_t i, auto lanes) {
    const VecF y = load_lanes(x + i, lanes) * scale_lanes(scale, i, lanes);
    const VecI inside = (as_int(y) & kMagnitude) <= as_int(splat(fp8::kMaxValue));
    store_lanes(dx + i, as_float(as_int(load_lanes(dy + i, lanes)) & inside), lanes);
  });
}

template <typename T>
constexpr RunKernels<T> run_kernels() {
  return {largest<T>, fold_largest<T>, encode_run<T>, decode_run<T>, round_run<T>, round_backward_run<T>};
}

constexpr fp8::RowKernels row_kernels() {
  return {run_kernels<float>(), run_kernels<Fp16>(), run_kernels<Bf16>()};
}

}  // namespace htree::HTREE_ISA
