// Rows rounded to int8, each with a step of its own, for scores of span means in int8:
// docs/semantics/tree_attention.md §1.15.
#pragma once

#include <cstdint>

#include "device/reduce.cuh"

namespace htree::tree_attention {

// |x| as an unsigned number: magnitudes keep their order, and what is not finite lies above all others.
__device__ __forceinline__ uint32_t magnitude_bits(float x) {
  return __float_as_uint(x) & 0x7fffffffu;
}

// The largest number that kLanes neighbouring lanes hold, kLanes a power of two. They call together.
template <int kLanes>
__device__ __forceinline__ uint32_t largest_of_lanes(uint32_t x) {
#pragma unroll
  for (int offset = 1; offset < kLanes; offset *= 2) {
    x = max(x, __shfl_xor_sync(device::kFullMask, x, offset));
  }
  return x;
}

// How a row is rounded whose largest element has these magnitude_bits(): element x becomes an integer of at most
// 127, halves to even, and counts as `step` times that integer. A row that is not finite has integers 0 and the
// step NaN, a row of less than 2^-100 has the step 0.
//
// There is no division: one in fp32 has a call, and a kernel with calls keeps nothing in uniform registers, so that
// every product of its warpgroups would pay for its descriptor.
struct RowRounding {
  float inverse, step;

  __device__ __forceinline__ explicit RowRounding(uint32_t largest_bits) {
    const float largest = __uint_as_float(largest_bits);
    const bool finite = largest_bits < 0x7f800000u, zero = largest < 0x1p-100f;
    float reciprocal;  // of largest / 1024, so that it stays normal
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(largest * 0x1p-10f));
    inverse = finite && !zero ? 127.f * 0x1p-10f * reciprocal : 0.f;
    step = !finite ? __uint_as_float(0x7fc00000u) : zero ? 0.f : largest * (1.f / 127.f);
  }

  __device__ __forceinline__ int operator()(float x) const {
    return __float2int_rn(x * inverse);  // NaN, which is infinity times 0 as well, becomes 0
  }
  // Two integers as bytes, the first one lowest.
  __device__ __forceinline__ uint32_t pair(float x, float y) const {
    return __byte_perm((*this)(x), (*this)(y), 0x0040) & 0xffffu;
  }
  __device__ __forceinline__ uint32_t four(float x, float y, float z, float w) const {
    return __byte_perm(pair(x, y), pair(z, w), 0x5410);
  }
};

}  // namespace htree::tree_attention
