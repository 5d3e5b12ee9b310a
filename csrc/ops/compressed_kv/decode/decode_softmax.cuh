// The online softmax of a warp of the decode kernel, and the unit of its accumulators.
#pragma once

#include <cstdint>

#include "device/mma.cuh"
#include "ops/compressed_kv/decode/decode.cuh"

namespace htree::compressed_kv {

constexpr float kMinusInfinity = -INFINITY;

// Weights are relative to a maximum that may lag behind the true one by this many powers of two, so that the
// sums are rescaled only a few times per split.
constexpr float kSlack = 8.0f;

// The softmax state of a warp: heads t and t + 4 of the lanes (g, t). Lanes with the same t have the same
// limits and bases; the sums are over the lane's own tokens.
template <int kHeadPairs>
struct WarpState {
  float limit[kHeadPairs];  // the maximum and the slack: a score above it raises the maximum
  float base[kHeadPairs];   // the maximum, or 0 while that is minus infinity
  float sum[kHeadPairs];
  float unit = 0.0f;          // accumulators count in it: a power of two, no |scale| of V exceeded it so far
  float inverse_unit = 0.0f;  // 0 while all scales are 0

  __device__ WarpState() {
#pragma unroll
    for (int i = 0; i < kHeadPairs; ++i) {
      limit[i] = kMinusInfinity;
      base[i] = 0.0f;
      sum[i] = 0.0f;
    }
  }

  __device__ __forceinline__ float max(int i) const {
    return limit[i] == kMinusInfinity ? kMinusInfinity : base[i];
  }
};

template <int kTiles>
__device__ __forceinline__ void rescale(float (&acc)[kTiles][4], float even, float odd) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    acc[i][0] *= even;
    acc[i][1] *= odd;
    acc[i][2] *= even;
    acc[i][3] *= odd;
  }
}

// Whether a score of this lane exceeds its maximum by more than the slack.
template <int kHeadPairs>
__device__ __forceinline__ bool exceeds_limit(const float (&score)[2][kHeadPairs],
                                              const WarpState<kHeadPairs>& state) {
  bool exceeds = false;
#pragma unroll
  for (int i = 0; i < kHeadPairs; ++i) {
    exceeds |= fmaxf(score[0][i], score[1][i]) > state.limit[i];
  }
  return exceeds;
}

// Raises the maxima where a score of any lane exceeds its limit.
template <int kTiles, int kHeadPairs>
__device__ __forceinline__ void raise_max(const float (&score)[2][kHeadPairs], WarpState<kHeadPairs>& state,
                                          float (&acc)[kTiles][4]) {
  if (!__any_sync(0xffffffffu, exceeds_limit(score, state))) {
    return;
  }
  float factor[kHeadPairs];
  bool first = true;  // all sums are 0
#pragma unroll
  for (int i = 0; i < kHeadPairs; ++i) {
    float largest = fmaxf(score[0][i], score[1][i]);
#pragma unroll
    for (int offset = 4; offset < 32; offset *= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
    }
    const float before = state.max(i);
    const float raised = fmaxf(before, largest);
    factor[i] = raised == kMinusInfinity ? 1.0f : device::exp2_flushed(before - raised);
    first = first && before == kMinusInfinity;
    // Rounded down: where floats lie 16 apart, rounding up would leave a weight of 2^16, beyond fp16.
    state.limit[i] = __fadd_rd(raised, kSlack);
    state.base[i] = raised == kMinusInfinity ? 0.0f : raised;
    state.sum[i] *= factor[i];
  }
  if (!__all_sync(0xffffffffu, first)) {
    rescale(acc, factor[0], factor[kHeadPairs - 1]);
  }
}

// The smallest power of two that is not below x, a positive fp16 value.
__device__ __forceinline__ float power_above(float x) {
  const int bits = __float_as_int(x);
  return __int_as_float((bits & 0x7f800000) + ((bits & 0x007fffff) != 0 ? 0x00800000 : 0));
}

template <int kTiles, int kHeadPairs>
__device__ __forceinline__ void raise_unit(const float (&scale)[2], WarpState<kHeadPairs>& state,
                                           float (&acc)[kTiles][4]) {
  const float own = fmaxf(fabsf(scale[0]), fabsf(scale[1]));
  if (!__any_sync(0xffffffffu, own > state.unit)) {
    return;
  }
  float largest = own;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
  }
  const float before = state.unit;
  state.unit = power_above(largest);
  state.inverse_unit = __int_as_float(0x7f000000 - __float_as_int(state.unit));  // of a power of two
  if (before != 0.0f) {
    const float factor = before * state.inverse_unit;
    rescale(acc, factor, factor);
  }
}

template <typename Tr>
struct WarpResult {
  WarpState<Tr::kHeadPairs> state;
  float acc[2 * Tr::kGroups][4];
  // The channels of this lane that a row of V with a NaN scale keeps, a byte per group of eight.
  uint32_t poison[Tr::kOwnWords];
};

template <typename Tr>
__device__ __forceinline__ void clear(WarpResult<Tr>& result) {
#pragma unroll
  for (int i = 0; i < 2 * Tr::kGroups; ++i) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      result.acc[i][c] = 0.0f;
    }
  }
#pragma unroll
  for (int i = 0; i < Tr::kOwnWords; ++i) {
    result.poison[i] = 0;
  }
}

}  // namespace htree::compressed_kv
