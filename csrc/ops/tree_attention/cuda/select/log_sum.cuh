// The running log-sum of scores in log2 units.
#pragma once

#include "device/mma.cuh"

namespace htree::tree_attention {

// log2 sum 2^s of what it has seen; -inf of nothing, NaN of a NaN.
struct LogSum {
  float max = -INFINITY, sum = 0.f;

  __device__ __forceinline__ static float finite(float m) { return fabsf(m) == INFINITY ? 0.f : m; }
  __device__ __forceinline__ void add(float other_max, float other_sum) {
    const float top = fmaxf(max, other_max);
    const float from = finite(top);
    sum = sum * device::exp2_flushed(max - from) + other_sum * device::exp2_flushed(other_max - from);
    max = top;
  }
  // Two scores.
  __device__ __forceinline__ void add_pair(float a, float b) {
    const float top = fmaxf(max, fmaxf(a, b));
    const float from = finite(top);
    sum = sum * device::exp2_flushed(max - from) +
          (device::exp2_flushed(a - from) + device::exp2_flushed(b - from));
    max = top;
  }
  // What a score is lowered by; +inf turns every weight to 0.
  __device__ __forceinline__ float reference() const {
    return sum == 0.f ? INFINITY : finite(max) + log2f(sum);
  }
};

}  // namespace htree::tree_attention
