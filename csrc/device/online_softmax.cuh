// Running maximum and sum of exponentials, with the special values of torch.logsumexp: a NaN stays, +inf wins
// over finite scores, -inf weighs nothing.
#pragma once

#include "device/numeric.cuh"
#include "device/reduce.cuh"

namespace htree::device {

// Unlike Max it keeps a NaN, whichever side it is on.
struct MaxNan {
  __device__ __forceinline__ float operator()(float a, float b) const { return a > b || a != a ? a : b; }
};

// A trivial type, so that it can stand in shared memory. empty() is the start.
struct OnlineSum {
  float max;
  float sum;

  __device__ __forceinline__ static OnlineSum empty() { return {negative_infinity<float>(), 0.0f}; }

  // Scores that are equal to the maximum count one each, so that inf - inf and -inf - -inf are never formed.
  __device__ __forceinline__ void add(float x) {
    if (x > max) {
      sum = sum * expf(max - x) + 1.0f;
      max = x;
    } else {
      sum += x == max ? 1.0f : expf(x - max);
    }
  }

  __device__ __forceinline__ float log_sum() const {
    const float infinity = -negative_infinity<float>();
    if (sum != sum) {
      return sum;
    }
    return max == -infinity || max == infinity ? max : max + logf(sum);
  }
};

// Commutative to the bit, so that a butterfly of shuffles leaves the same value in every lane.
struct MergeOnlineSum {
  __device__ __forceinline__ OnlineSum operator()(const OnlineSum& a, const OnlineSum& b) const {
    OnlineSum merged;
    merged.max = Max{}(a.max, b.max);
    const float sum_a = a.max == merged.max ? a.sum : a.sum * expf(a.max - merged.max);
    const float sum_b = b.max == merged.max ? b.sum : b.sum * expf(b.max - merged.max);
    merged.sum = sum_a + sum_b;
    return merged;
  }
};

// Every thread of a block of kThreads must call; all get the sum over the block. The order of the additions
// depends on kThreads alone. `scratch` holds kThreads / 32 values in shared memory. Costs two __syncthreads,
// the second of which frees the scratch.
template <int kThreads>
__device__ __forceinline__ OnlineSum block_merge(OnlineSum value, OnlineSum* scratch) {
  const MergeOnlineSum merge;
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    OnlineSum other;
    other.max = __shfl_xor_sync(kFullMask, value.max, offset);
    other.sum = __shfl_xor_sync(kFullMask, value.sum, offset);
    value = merge(value, other);
  }
  if (threadIdx.x % kWarpSize == 0) {
    scratch[threadIdx.x / kWarpSize] = value;
  }
  __syncthreads();
  value = scratch[0];
#pragma unroll
  for (int warp = 1; warp < kThreads / kWarpSize; ++warp) {
    value = merge(value, scratch[warp]);
  }
  __syncthreads();
  return value;
}

}  // namespace htree::device
