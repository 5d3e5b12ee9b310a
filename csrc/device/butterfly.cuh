// Stages of the fast Walsh-Hadamard transform on values in registers (docs/semantics/hadamard.md §4.1).
// A stage works on one bit b of the element index: where two indices differ in b alone, the lower
// element becomes the sum and the upper one the difference. Stages on different bits commute, so they
// may come in any order.
#pragma once

#include "device/reduce.cuh"

namespace htree::device {

// One stage within a thread, on values whose register indices differ in bit kBit.
template <int kBit, typename A, int N>
__device__ __forceinline__ void butterfly_registers(A (&value)[N]) {
  static_assert((2 << kBit) <= N, "no such bit");
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if ((i >> kBit & 1) == 0) {
      const A low = value[i];
      const A high = value[i | 1 << kBit];
      value[i] = low + high;
      value[i | 1 << kBit] = low - high;
    }
  }
}

// The stages of register bits [kFirst, kLast).
template <int kFirst, int kLast, typename A, int N>
__device__ __forceinline__ void butterfly_register_bits(A (&value)[N]) {
  if constexpr (kFirst < kLast) {
    butterfly_registers<kFirst>(value);
    butterfly_register_bits<kFirst + 1, kLast>(value);
  }
}

// The stages of lane bits [kFirst, kLast). All 32 lanes must call. A stage costs one shuffle and one
// multiply-add per value; the product with 1 or -1 is exact.
template <int kFirst, int kLast, typename A, int N>
__device__ __forceinline__ void butterfly_lane_bits(A (&value)[N]) {
  if constexpr (kFirst < kLast) {
    constexpr int kMask = 1 << kFirst;
    const A sign = (threadIdx.x & kMask) != 0 ? A(-1) : A(1);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      value[i] = sign * value[i] + __shfl_xor_sync(kFullMask, value[i], kMask);
    }
    butterfly_lane_bits<kFirst + 1, kLast>(value);
  }
}

}  // namespace htree::device
