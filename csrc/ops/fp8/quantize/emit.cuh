// What the kernels make of a pack and its scale: codes, the values that codes stand for, or a gradient.
#pragma once

#include <climits>
#include <cstdint>

#include "device/fp8.cuh"
#include "device/numeric.cuh"
#include "device/pack.cuh"
#include "device/reduce.cuh"
#include "ops/fp8/e4m3.h"
#include "ops/fp8/quantize/magnitude.cuh"

namespace htree::fp8 {

using device::Pack;

// How kernels hold a pack: codes four to a word, or else the compiler takes what it loads apart into bytes.
template <typename T, int N>
inline constexpr bool kInWords = sizeof(T) == 1 && N % 4 == 0;
template <typename T, int N>
using Held = std::conditional_t<kInWords<T, N>, Pack<uint32_t, kInWords<T, N> ? N / 4 : 1>, Pack<T, N>>;

// Loads a pack, or zeros where it is not wanted. It chooses word by word, for the same reason. kStreams: nobody reads it
// again.
template <int N, bool kStreams = false, typename T>
__device__ __forceinline__ Held<T, N> load_held(bool is_wanted, const T* p) {
  if constexpr (sizeof(T) * N % sizeof(uint32_t) == 0) {
    constexpr int kWords = static_cast<int>(sizeof(T) * N / sizeof(uint32_t));
    Pack<uint32_t, kWords> words{};
    if (is_wanted) {
      const auto* from = reinterpret_cast<const uint32_t*>(p);
      words = kStreams ? device::load_pack_streaming<kWords>(from) : device::load_pack<kWords>(from);
    }
    return *reinterpret_cast<const Held<T, N>*>(&words);
  } else {
    return is_wanted ? *reinterpret_cast<const Held<T, N>*>(p) : Held<T, N>{};
  }
}

// Whether 1 / scale and everything that OneScale and LaneScales compute from it stays clear of underflow and
// overflow. It is asked once per chunk: a branch per element cost more than the memory traffic.
__device__ __forceinline__ bool is_moderate(float scale) {
  return scale >= 0x1p-100f && scale <= 0x1p100f;
}

// value / scale, rounded as a division rounds it, for a moderate scale. With r the rounded 1 / scale and y =
// value r, the quotient is y - r (y scale - value) in multiply-adds (Markstein, IBM J. Res. Dev. 34, 1990).
// The residual of a zero is +0, so that the zero keeps its sign in the last addition.
__device__ __forceinline__ float quotient(float value, float scale, float reciprocal) {
  const float y = value * reciprocal;
  return fmaf(-fmaf(y, scale, -value), reciprocal, y);
}

// One scale for all elements of a pack. Quotients are fast where the scale is known to be moderate.
template <bool kModerate>
class OneScale {
 public:
  __device__ __forceinline__ explicit OneScale(float scale)
      : scale_(scale), reciprocal_(kModerate ? 1.0f / scale : 0.0f) {}

  __device__ __forceinline__ float of(int) const { return scale_; }
  __device__ __forceinline__ float quotient(float value, int) const {
    return kModerate ? fp8::quotient(value, scale_, reciprocal_) : value / scale_;
  }

 private:
  float scale_;
  float reciprocal_;
};

// A scale for each element of a pack.
template <int N, bool kModerate>
class LaneScales {
 public:
  __device__ __forceinline__ explicit LaneScales(const float* scale) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      scale_[i] = scale[i];
      reciprocal_[i] = kModerate ? 1.0f / scale[i] : 0.0f;
    }
  }

  __device__ __forceinline__ float of(int i) const {
    return scale_[i];
  }
  __device__ __forceinline__ float quotient(float value, int i) const {
    return kModerate ? fp8::quotient(value, scale_[i], reciprocal_[i]) : value / scale_[i];
  }

 private:
  float scale_[N];
  float reciprocal_[N];
};

// The codes of x * s, rounded to nearest even; the product is rounded to fp32 first.
template <typename T, int N, typename Scale>
__device__ __forceinline__ Held<uint8_t, N> encode_pack(const Pack<T, N>& x, const Scale& scale) {
  const auto product = [&](int i) { return __fmul_rn(device::to_acc(x[i]), scale.of(i)); };
  Held<uint8_t, N> out;
  if constexpr (kInWords<uint8_t, N>) {
#pragma unroll
    for (int i = 0; i < N; i += 4) {
      const uint32_t high = device::encode_e4m3x2(product(i + 2), product(i + 3));
      out[i / 4] = device::encode_e4m3x2(product(i), product(i + 1)) | high << 16;
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      out[i] = device::encode_e4m3(product(i));
    }
  }
  return out;
}

// q / s rounded to T.
template <typename T, int N, typename Scale>
__device__ __forceinline__ Pack<T, N> decode_pack(const Held<uint8_t, N>& codes, const Scale& scale) {
  float value[N];
  if constexpr (kInWords<uint8_t, N>) {
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      const uint32_t word = codes[i / 4];
      const float2 pair = device::decode_e4m3x2(static_cast<uint16_t>(i % 4 == 0 ? word : word >> 16));
      value[i] = scale.quotient(pair.x, i);
      value[i + 1] = scale.quotient(pair.y, i + 1);
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      value[i] = scale.quotient(device::decode_e4m3(codes[i]), i);
    }
  }
  Pack<T, N> out;
  device::from_acc<T, N>(value, out.data);
  return out;
}

// The jobs of a kernel: the types In and Out, and what becomes of a pack. Only RoundBackward takes `dy`.
template <typename T>
struct Encode {
  using In = T;
  using Out = uint8_t;
  template <int N, typename Scale>
  __device__ __forceinline__ static Held<Out, N> apply(const Held<In, N>& x, const Held<Out, N>&,
                                                       const Scale& scale) {
    return encode_pack<T, N>(x, scale);
  }
};

template <typename T>
struct Round {
  using In = T;
  using Out = T;
  template <int N, typename Scale>
  __device__ __forceinline__ static Held<Out, N> apply(const Held<In, N>& x, const Held<Out, N>&,
                                                       const Scale& scale) {
    return decode_pack<T, N>(encode_pack<T, N>(x, scale), scale);
  }
};

template <typename T>
struct Decode {
  using In = uint8_t;
  using Out = T;
  template <int N, typename Scale>
  __device__ __forceinline__ static Held<Out, N> apply(const Held<In, N>& codes, const Held<Out, N>&,
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
  __device__ __forceinline__ static Held<Out, N> apply(const Held<In, N>& x, const Held<Out, N>& dy,
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

// Nothing is written: only the scale is wanted.
template <typename T>
struct Nothing {
  using In = T;
  using Out = uint8_t;
};

template <typename Job>
inline constexpr bool kEncodes = std::is_same_v<Job, Encode<typename Job::In>>;
template <typename Job>
inline constexpr bool kIsDecode = std::is_same_v<Job, Decode<typename Job::Out>>;
// Jobs that divide by the scale.
template <typename Job>
inline constexpr bool kDivides = std::is_same_v<Job, Round<typename Job::In>> || kIsDecode<Job>;
template <typename Job>
inline constexpr bool kIsBackward = std::is_same_v<Job, RoundBackward<typename Job::In>>;

// Whether the product of any element with its scale is beyond the rounding limit. Inf is beyond, NaN is not.
template <typename T, int N, typename Scale>
__device__ __forceinline__ bool exceeds_limit(const Pack<T, N>& x, const Scale& scale) {
  bool is_beyond = false;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    is_beyond |= fabsf(__fmul_rn(device::to_acc(x[i]), scale.of(i))) > kRoundingLimit;
  }
  return is_beyond;
}

// The number of such elements.
template <typename T, int N, typename Scale>
__device__ __forceinline__ int count_overflow(const Pack<T, N>& x, const Scale& scale) {
  int count = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    count += fabsf(__fmul_rn(device::to_acc(x[i]), scale.of(i))) > kRoundingLimit;
  }
  return count;
}

// Adds the warp's total to the counter; all lanes of the warp must call. The counter stops at INT_MAX: a warp
// that raises it above brings it back, and what other warps add meanwhile stays far from 2^31.
__device__ __forceinline__ void add_overflow(int count, int* num_overflow) {
  count = device::warp_reduce<device::Sum>(count);
  if (count != 0 && threadIdx.x % device::kWarpSize == 0) {
    auto* counter = reinterpret_cast<unsigned*>(num_overflow);
    // These are integers, so the order of the additions does not show.
    if (atomicAdd(counter, static_cast<unsigned>(count)) > static_cast<unsigned>(INT_MAX - count)) {
      atomicMin(counter, static_cast<unsigned>(INT_MAX));
    }
  }
}

// Codes go through the L2 cache to the kernel that multiplies them. Whole 16-byte packs of values stream past
// it, which took rows of 8192 bf16 values from 205 to 134 us on an H200.
template <int N, typename T>
__device__ __forceinline__ void store_result(T* p, const Held<T, N>& value) {
  if constexpr (kInWords<T, N>) {
    device::store_pack_streaming(reinterpret_cast<uint32_t*>(p), value);
  } else {
    device::store_pack_streaming(p, value);
  }
}

}  // namespace htree::fp8
