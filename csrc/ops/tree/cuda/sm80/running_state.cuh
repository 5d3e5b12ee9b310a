// The running state of a softmax between layers: docs/semantics/tree_attention.md §1.7.
#pragma once

#include "device/mma.cuh"

namespace htree::tree_attention {

constexpr float kLn2 = 0.693147180559945f;  // maxima are in log2 units until the last layer

// Merges another state into (max, sum). `own` and `other` are the factors of the two unnormalised outputs.
__device__ __forceinline__ void merge_states(float& max, float& sum, float other_max, float other_sum,
                                             float& own, float& other) {
  const float top = fmaxf(max, other_max);
  own = sum == 0.f ? 0.f : device::exp2_flushed(max - top);
  other = other_sum == 0.f ? 0.f : device::exp2_flushed(other_max - top);
  sum = sum * own + other_sum * other;
  max = top;
}

// Running log2 of the sum of 2^s over scores in log2 units: -inf where there was none, NaN where one is NaN.
struct LogSum {
  float max = -INFINITY, sum = 0.f;

  __device__ __forceinline__ static float finite(float m) { return fabsf(m) == INFINITY ? 0.f : m; }
  __device__ __forceinline__ void add(float other_max, float other_sum) {
    const float top = fmaxf(max, other_max);
    const float from = finite(top);
    sum = sum * device::exp2_flushed(max - from) + other_sum * device::exp2_flushed(other_max - from);
    max = top;
  }
  // Adds two scores.
  __device__ __forceinline__ void add_pair(float a, float b) {
    const float top = fmaxf(max, fmaxf(a, b));
    const float from = finite(top);
    sum = sum * device::exp2_flushed(max - from) +
          (device::exp2_flushed(a - from) + device::exp2_flushed(b - from));
    max = top;
  }
  // Adds four scores.
  __device__ __forceinline__ void add_four(const float (&s)[4]) {
    const float top = fmaxf(max, fmaxf(fmaxf(s[0], s[1]), fmaxf(s[2], s[3])));
    const float from = finite(top);
    sum = sum * device::exp2_flushed(max - from) +
          ((device::exp2_flushed(s[0] - from) + device::exp2_flushed(s[1] - from)) +
           (device::exp2_flushed(s[2] - from) + device::exp2_flushed(s[3] - from)));
    max = top;
  }
  // The sum as a score of its own.
  __device__ __forceinline__ float score() const { return sum == 0.f ? -INFINITY : finite(max) + log2f(sum); }
  // What to subtract from a score before it becomes a weight; +inf makes every weight 0.
  __device__ __forceinline__ float reference() const {
    return sum == 0.f ? INFINITY : finite(max) + log2f(sum);
  }
};

}  // namespace htree::tree_attention
