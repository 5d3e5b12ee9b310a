// The largest finite magnitude of a thread's elements, found on their bit patterns: without the sign bit
// these order as the values do, with infinities and NaN on top.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "device/numeric.cuh"
#include "device/pack.cuh"
#include "device/reduce.cuh"

namespace htree::fp8 {

template <typename T>
inline constexpr uint32_t kInfinityBits = 0x7f800000u;
template <>
inline constexpr uint32_t kInfinityBits<__half> = 0x7c00u;
template <>
inline constexpr uint32_t kInfinityBits<__nv_bfloat16> = 0x7f80u;

// |x| as bits.
template <typename T>
__device__ __forceinline__ uint32_t magnitude_bits(T x) {
  if constexpr (sizeof(T) == 2) {
    return *reinterpret_cast<const uint16_t*>(&x) & 0x7fffu;
  } else {
    return __float_as_uint(x) & 0x7fffffffu;
  }
}

template <typename T>
__device__ __forceinline__ float magnitude_of(uint32_t bits) {
  if constexpr (sizeof(T) == 2) {
    const uint16_t half = static_cast<uint16_t>(bits);
    return device::to_acc(*reinterpret_cast<const T*>(&half));
  } else {
    return __uint_as_float(bits);
  }
}

struct MaxBits {
  __device__ __forceinline__ uint32_t operator()(uint32_t a, uint32_t b) const { return a > b ? a : b; }
};

// The bits of the largest magnitude of N elements. Half types are compared in pairs, one instruction for two.
template <typename T, int N>
__device__ __forceinline__ uint32_t largest_bits(const T (&x)[N]) {
  uint32_t best = 0;
  if constexpr (sizeof(T) == 2 && N % 2 == 0) {
    const uint32_t* pairs = reinterpret_cast<const uint32_t*>(x);
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      best = __vmaxu2(best, pairs[i] & 0x7fff7fffu);
    }
    return MaxBits{}(best & 0xffffu, best >> 16);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      best = MaxBits{}(best, magnitude_bits(x[i]));
    }
    return best;
  }
}

// The same over finite elements alone; 0 where there is none.
template <typename T, int N>
__device__ __forceinline__ uint32_t largest_finite_bits(const T (&x)[N]) {
  uint32_t best = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const uint32_t bits = magnitude_bits(x[i]);
    best = bits < kInfinityBits<T> ? MaxBits{}(best, bits) : best;
  }
  return best;
}

// Magnitudes side by side in words, two of the half types in one, so that maxima are taken lane by lane.
template <typename T, int N>
struct MagnitudeWords {
  static constexpr int kPerWord = sizeof(T) == 2 ? 2 : 1;
  static constexpr int kWords = (N + kPerWord - 1) / kPerWord;
  uint32_t word[kWords] = {};

  // The magnitudes of a pack. Where N is 1 the other half of a word is 0.
  __device__ __forceinline__ static MagnitudeWords of(const device::Pack<T, N>& x) {
    MagnitudeWords result;
    if constexpr (N % kPerWord == 0) {
      const uint32_t* words = reinterpret_cast<const uint32_t*>(x.data);
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        result.word[i] = words[i] & (kPerWord == 2 ? 0x7fff7fffu : 0x7fffffffu);
      }
    } else {
      result.word[0] = magnitude_bits(x[0]);
    }
    return result;
  }

  __device__ __forceinline__ static uint32_t larger(uint32_t a, uint32_t b) {
    return kPerWord == 2 ? __vmaxu2(a, b) : MaxBits{}(a, b);
  }
  __device__ __forceinline__ void raise_to(const MagnitudeWords& other) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      word[i] = larger(word[i], other.word[i]);
    }
  }

  __device__ __forceinline__ uint32_t operator[](int i) const {
    return kPerWord == 2 ? word[i / 2] >> i % 2 * 16 & 0xffffu : word[i];
  }
  __device__ __forceinline__ bool has_special() const {
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      most = larger(most, word[i]);
    }
    return kPerWord == 2 ? (most & 0xffffu) >= kInfinityBits<T> || most >> 16 >= kInfinityBits<T>
                         : most >= kInfinityBits<T>;
  }
  // Replaces infinities and NaN by 0.
  __device__ __forceinline__ void keep_finite() {
#pragma unroll
    for (int i = 0; i < kWords * kPerWord; ++i) {
      if ((*this)[i] >= kInfinityBits<T>) {
        word[i / kPerWord] &= kPerWord == 2 ? 0xffff0000u >> i % 2 * 16 : 0u;
      }
    }
  }
};

}  // namespace htree::fp8
