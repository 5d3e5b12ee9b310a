// What the kernels make of a pack of x and its scale: codes, or the values that the codes stand for.
#pragma once

#include <cstdint>

#include "device/fp8.cuh"
#include "device/numeric.cuh"
#include "device/pack.cuh"
#include "device/reduce.cuh"
#include "ops/fp8/e4m3.h"
#include "ops/fp8/quantize/magnitude.cuh"

namespace htree::fp8 {

using device::Pack;

// One scale for all elements of a pack. Quotients are exact roundings, as those of a division: with r the
// rounded 1 / s and y = q r, y + r (q - y s) in multiply-adds is the rounded q / s (Markstein, IBM J. Res. Dev.
// 34, 1990), as long as nothing underflows or overflows.
class OneScale {
 public:
  __device__ __forceinline__ explicit OneScale(float scale)
      : scale_(scale),
        reciprocal_(1.0f / scale),
        is_moderate_(scale >= 0x1p-100f && scale <= 0x1p100f) {}

  __device__ __forceinline__ float of(int) const { return scale_; }
  __device__ __forceinline__ float quotient(float value, int) const {
    if (!is_moderate_) {
      return value / scale_;
    }
    const float y = value * reciprocal_;
    return fmaf(fmaf(-y, scale_, value), reciprocal_, y);
  }

 private:
  float scale_;
  float reciprocal_;
  bool is_moderate_;
};

// A scale for each element.
template <int N>
class LaneScales {
 public:
  __device__ __forceinline__ explicit LaneScales(const float* scale) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      scale_[i] = __ldg(scale + i);
    }
  }

  __device__ __forceinline__ float of(int i) const { return scale_[i]; }
  __device__ __forceinline__ float quotient(float value, int i) const { return value / scale_[i]; }

 private:
  float scale_[N];
};

template <typename T, int N, typename Scale>
__device__ __forceinline__ Pack<T, N> decode_pack(const Pack<uint8_t, N>& codes, const Scale& scale) {
  Pack<T, N> out;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    out[i] = device::from_acc<T>(scale.quotient(device::decode_e4m3(codes[i]), i));
  }
  return out;
}

// RNE codes of x * s. The product is rounded to fp32 first.
struct EmitCodes {
  template <typename T>
  using Out = uint8_t;

  template <typename T, int N, typename Scale>
  __device__ __forceinline__ static Pack<uint8_t, N> apply(const Pack<T, N>& x, const Scale& scale) {
    Pack<uint8_t, N> out;
    if constexpr (N % 2 == 0) {
#pragma unroll
      for (int i = 0; i < N; i += 2) {
        *reinterpret_cast<uint16_t*>(&out[i]) =
            device::encode_e4m3x2(__fmul_rn(device::to_acc(x[i]), scale.of(i)),
                                  __fmul_rn(device::to_acc(x[i + 1]), scale.of(i + 1)));
      }
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        out[i] = device::encode_e4m3(__fmul_rn(device::to_acc(x[i]), scale.of(i)));
      }
    }
    return out;
  }
};

// The same, divided by s again and rounded to T.
struct EmitValues {
  template <typename T>
  using Out = T;

  template <typename T, int N, typename Scale>
  __device__ __forceinline__ static Pack<T, N> apply(const Pack<T, N>& x, const Scale& scale) {
    return decode_pack<T, N>(EmitCodes::apply<T, N>(x, scale), scale);
  }
};

// The scale alone is wanted.
struct EmitNothing {
  template <typename T>
  using Out = uint8_t;
};

// Elements whose product with the scale is beyond the rounding limit; Inf counts, NaN does not.
template <typename T, int N, typename Scale>
__device__ __forceinline__ int count_overflow(const Pack<T, N>& x, const Scale& scale) {
  int count = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const bool is_beyond = fabsf(__fmul_rn(device::to_acc(x[i]), scale.of(i))) > kRoundingLimit;
    count += is_beyond || magnitude_bits(x[i]) == kInfinityBits<T>;
  }
  return count;
}

// All lanes of the warp must call; adds the warp's total to the counter.
__device__ __forceinline__ void add_overflow(int count, int* num_overflow) {
  count = device::warp_reduce<device::Sum>(count);
  if (count != 0 && threadIdx.x % device::kWarpSize == 0) {
    atomicAdd(num_overflow, count);  // integers: the order of the additions does not show
  }
}

}  // namespace htree::fp8
