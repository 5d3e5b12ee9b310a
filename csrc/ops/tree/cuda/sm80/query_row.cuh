// Brings query rows into an fp16 operand in shared memory: a thread takes 8 dims of the lower half of a row
// and their partners in the upper half, rotates them and rounds.
#pragma once

#include "device/mma.cuh"
#include "device/numeric.cuh"
#include "device/reduce.cuh"
#include "ops/tree/cuda/sm80/packed_layer.cuh"

namespace htree::tree_attention {

// 8 consecutive elements as they are stored, in one load where rows are aligned to 16 bytes.
template <typename T>
__device__ __forceinline__ uint4 load_eight(const T* from, bool aligned) {
  if (aligned) {
    return __ldg(reinterpret_cast<const uint4*>(from));
  }
  const uint16_t* x = reinterpret_cast<const uint16_t*>(from);
  return make_uint4(x[0] | uint32_t{x[1]} << 16, x[2] | uint32_t{x[3]} << 16, x[4] | uint32_t{x[5]} << 16,
                    x[6] | uint32_t{x[7]} << 16);
}
template <typename T>
__device__ __forceinline__ void widen_eight(const uint4& raw, float (&x)[8]) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    x[i] = device::to_acc(reinterpret_cast<const T*>(words)[i]);
  }
}

// The largest finite |element| of a row that kLanes neighbouring lanes hold, kLanes a power of
// two. They call together.
template <int kLanes>
__device__ __forceinline__ float row_magnitude(const float (&low)[8], const float (&high)[8]) {
  float largest = 0.f;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    largest = fmaxf(largest, fmaxf(finite_magnitude(low[i]), finite_magnitude(high[i])));
  }
#pragma unroll
  for (int offset = 1; offset < kLanes; offset *= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(device::kFullMask, largest, offset));
  }
  return largest;
}

// The same for kRows rows, the elements of which are as they are stored: fetch(row, low, high) brings 8 of each half. Pairs
// are compared as integers. Without their signs, the bits of finite numbers are in the order of the numbers, and those of
// infinities and NaN come behind them: kBias makes those negative.
template <typename T, int kLanes, int kRows, typename Fetch>
__device__ __forceinline__ void row_magnitudes(float (&magnitudes)[kRows], Fetch fetch) {
  constexpr uint32_t kInfinity = __is_same(T, __nv_bfloat16) ? 0x7f80u : 0x7c00u;
  constexpr uint32_t kBias = 0x8000u - kInfinity, kBiases = kBias * 0x10001u;
  uint32_t largest[kRows];
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    uint4 low, high;
    fetch(row, low, high);
    const uint32_t pairs[2][4] = {{low.x, low.y, low.z, low.w}, {high.x, high.y, high.z, high.w}};
    uint32_t best[2] = {kBiases, kBiases};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      best[i % 2] = __viaddmax_s16x2(pairs[i % 2][i / 2] & 0x7fff7fffu, kBiases, best[i % 2]);
    }
    best[0] = __vmaxu2(best[0], best[1]);
    largest[row] = max(best[0] & 0xffffu, best[0] >> 16);
  }
#pragma unroll
  for (int offset = 1; offset < kLanes; offset *= 2) {
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      largest[row] = max(largest[row], __shfl_xor_sync(device::kFullMask, largest[row], offset));
    }
  }
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
    const auto bits = static_cast<uint16_t>(largest[row] - kBias);
    magnitudes[row] = device::to_acc(reinterpret_cast<const T&>(bits));
  }
}

// `rotations`: cos and sin of two dims in each.
__device__ __forceinline__ void rotate_eight(const float (&low)[8], const float (&high)[8], float scale,
                                             const float4 (&rotations)[4], uint4& rotated_low,
                                             uint4& rotated_high) {
  uint32_t first[4], second[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float4 rotation = rotations[i];
    const float x0 = low[2 * i] * scale, y0 = high[2 * i] * scale;
    const float x1 = low[2 * i + 1] * scale, y1 = high[2 * i + 1] * scale;
    first[i] =
        device::pack_pair<__half>(x0 * rotation.x - y0 * rotation.y, x1 * rotation.z - y1 * rotation.w);
    second[i] =
        device::pack_pair<__half>(x0 * rotation.y + y0 * rotation.x, x1 * rotation.w + y1 * rotation.z);
  }
  rotated_low = make_uint4(first[0], first[1], first[2], first[3]);
  rotated_high = make_uint4(second[0], second[1], second[2], second[3]);
}
// The same of elements as they are stored. bfloat16 is widened by one instruction an element, where to_acc() takes three
// for two.
template <typename T>
__device__ __forceinline__ void rotate_eight(const uint4& low, const uint4& high, float scale,
                                             const float4 (&rotations)[4], uint4& rotated_low,
                                             uint4& rotated_high) {
  float first[8], second[8];
  if constexpr (__is_same(T, __nv_bfloat16)) {
    const uint32_t words[2][4] = {{low.x, low.y, low.z, low.w}, {high.x, high.y, high.z, high.w}};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      first[i] = __uint_as_float(i % 2 == 0 ? words[0][i / 2] << 16 : words[0][i / 2] & 0xffff0000u);
      second[i] = __uint_as_float(i % 2 == 0 ? words[1][i / 2] << 16 : words[1][i / 2] & 0xffff0000u);
    }
  } else {
    widen_eight<T>(low, first);
    widen_eight<T>(high, second);
  }
  rotate_eight(first, second, scale, rotations, rotated_low, rotated_high);
}

}  // namespace htree::tree_attention
