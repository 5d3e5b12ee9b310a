// What the kernels make of a pack and its scale: codes, the values that codes stand for, a gradient.
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

// value / scale, rounded as a division rounds it. With r the rounded 1 / s and y = q r, y + r (q - y s) in
// multiply-adds is the rounded q / s (Markstein, IBM J. Res. Dev. 34, 1990) as long as nothing underflows or
// overflows; it loses the sign of a zero, which is put back.
__device__ __forceinline__ float quotient(float value, float scale, float reciprocal, bool is_moderate) {
  if (!is_moderate) {
    return value / scale;
  }
  const float y = value * reciprocal;
  return copysignf(fmaf(fmaf(-y, scale, value), reciprocal, y), value);
}
__device__ __forceinline__ bool is_moderate(float scale) {
  return scale >= 0x1p-100f && scale <= 0x1p100f;
}

// One scale for all elements of a pack.
class OneScale {
 public:
  __device__ __forceinline__ explicit OneScale(float scale)
      : scale_(scale), reciprocal_(1.0f / scale), is_moderate_(is_moderate(scale)) {}

  __device__ __forceinline__ float of(int) const { return scale_; }
  __device__ __forceinline__ float quotient(float value, int) const {
    return fp8::quotient(value, scale_, reciprocal_, is_moderate_);
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
    is_moderate_ = true;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      scale_[i] = scale[i];
      reciprocal_[i] = 1.0f / scale_[i];
      is_moderate_ &= is_moderate(scale_[i]);
    }
  }

  __device__ __forceinline__ float of(int i) const {
    return scale_[i];
  }
  __device__ __forceinline__ float quotient(float value, int i) const {
    return fp8::quotient(value, scale_[i], reciprocal_[i], is_moderate_);
  }

 private:
  float scale_[N];
  float reciprocal_[N];
  bool is_moderate_;
};

// RNE codes of x * s; the product is rounded to fp32 first.
template <typename T, int N, typename Scale>
__device__ __forceinline__ Pack<uint8_t, N> encode_pack(const Pack<T, N>& x, const Scale& scale) {
  Pack<uint8_t, N> out;
  if constexpr (N % 2 == 0) {
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      *reinterpret_cast<uint16_t*>(&out[i]) = device::encode_e4m3x2(
          __fmul_rn(device::to_acc(x[i]), scale.of(i)), __fmul_rn(device::to_acc(x[i + 1]), scale.of(i + 1)));
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      out[i] = device::encode_e4m3(__fmul_rn(device::to_acc(x[i]), scale.of(i)));
    }
  }
  return out;
}

// q / s rounded to T.
template <typename T, int N, typename Scale>
__device__ __forceinline__ Pack<T, N> decode_pack(const Pack<uint8_t, N>& codes, const Scale& scale) {
  Pack<T, N> out;
  if constexpr (N % 2 == 0) {
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      const float2 value = device::decode_e4m3x2(*reinterpret_cast<const uint16_t*>(&codes[i]));
      out[i] = device::from_acc<T>(scale.quotient(value.x, i));
      out[i + 1] = device::from_acc<T>(scale.quotient(value.y, i + 1));
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      out[i] = device::from_acc<T>(scale.quotient(device::decode_e4m3(codes[i]), i));
    }
  }
  return out;
}

// The jobs of a kernel: In and Out storage, and what becomes of a pack. `dy` is for RoundBackward alone.
template <typename T>
struct Encode {
  using In = T;
  using Out = uint8_t;
  template <int N, typename Scale>
  __device__ __forceinline__ static Pack<Out, N> apply(const Pack<In, N>& x, const Pack<Out, N>&,
                                                       const Scale& scale) {
    return encode_pack<T, N>(x, scale);
  }
};

template <typename T>
struct Round {
  using In = T;
  using Out = T;
  template <int N, typename Scale>
  __device__ __forceinline__ static Pack<Out, N> apply(const Pack<In, N>& x, const Pack<Out, N>&,
                                                       const Scale& scale) {
    return decode_pack<T, N>(encode_pack<T, N>(x, scale), scale);
  }
};

template <typename T>
struct Decode {
  using In = uint8_t;
  using Out = T;
  template <int N, typename Scale>
  __device__ __forceinline__ static Pack<Out, N> apply(const Pack<In, N>& codes, const Pack<Out, N>&,
                                                       const Scale& scale) {
    return decode_pack<T, N>(codes, scale);
  }
};

// dy where |x s| <= 448, else 0.
template <typename T>
struct RoundBackward {
  using In = T;
  using Out = T;
  template <int N, typename Scale>
  __device__ __forceinline__ static Pack<Out, N> apply(const Pack<In, N>& x, const Pack<Out, N>& dy,
                                                       const Scale& scale) {
    Pack<T, N> out;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const bool is_inside = fabsf(__fmul_rn(device::to_acc(x[i]), scale.of(i))) <= kMaxValue;
      out[i] = is_inside ? dy[i] : device::from_acc<T>(0.0f);
    }
    return out;
  }
};

// The scale alone is wanted.
template <typename T>
struct Nothing {
  using In = T;
  using Out = uint8_t;
};

template <typename Job>
inline constexpr bool kEncodes = std::is_same_v<Job, Encode<typename Job::In>>;
template <typename Job>
inline constexpr bool kIsBackward = std::is_same_v<Job, RoundBackward<typename Job::In>>;

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

// Codes go through the L2 cache to whoever multiplies them; whole 16-byte packs of values stream past it,
// which took rows of 8192 bf16 values from 205 to 134 us on an H200.
template <typename T, int N>
__device__ __forceinline__ void store_result(T* p, const Pack<T, N>& value) {
  device::store_pack_streaming(p, value);
}

}  // namespace htree::fp8
