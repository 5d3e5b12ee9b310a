// The running state of a softmax between layers: docs/semantics/tree_attention.md §1.7.
#pragma once

#include "device/mma.cuh"

namespace htree::tree_attention {

constexpr float kLn2 = 0.693147180559945f;  // maxima are in log2 units until the last layer

// (max, sum) becomes that of both; `own` and `other` are what their unnormalised outputs weigh in it.
__device__ __forceinline__ void merge_states(float& max, float& sum, float other_max, float other_sum,
                                             float& own, float& other) {
  const float top = fmaxf(max, other_max);
  own = sum == 0.f ? 0.f : device::exp2_flushed(max - top);
  other = other_sum == 0.f ? 0.f : device::exp2_flushed(other_max - top);
  sum = sum * own + other_sum * other;
  max = top;
}

}  // namespace htree::tree_attention
