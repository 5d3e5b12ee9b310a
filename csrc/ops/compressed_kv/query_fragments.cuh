// The query heads of a block as the right-hand operand of the score products. Column n of a product belongs
// to query head (n >> 1) + 4 * (n & 1) with 16-bit keys, so that lane (g, t) of the result holds heads t and
// t + 4. With 8 and 4 bits the query is an integer of 16 bits per channel in two int8 pieces, and column n of
// product i is piece n & 1 of head 4 * i + (n >> 1): the dot products with the codes are exact.
#pragma once

#include <cstdint>

#include "device/mma.cuh"
#include "device/numeric.cuh"
#include "ops/compressed_kv/decode_params.h"

namespace htree::compressed_kv {

__device__ __forceinline__ float load_query(const DecodeParams& p, int64_t index) {
  switch (p.q_type) {
    case QueryType::kHalf:
      return __half2float(static_cast<const __half*>(p.q)[index]);
    case QueryType::kBfloat16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(p.q)[index]);
    default:
      return static_cast<const float*>(p.q)[index];
  }
}

constexpr float kQuerySteps = 127 * 256;

// Lane t of a quad owns channels [t * D/4, (t + 1) * D/4): kGroups groups of eight.
template <int kHeadDim, bool kInteger>
struct QueryFragments {
  static constexpr int kGroups = kHeadDim / 32;
  // Integer: [product][group][half of the channels]; 16 bits: [0][group][pair of channels], four of them.
  static constexpr int kProducts = kInteger ? 2 : 1;
  static constexpr int kRegisters = kInteger ? 2 : 4;
  uint32_t b[kProducts][kGroups][kRegisters];
  float factor[2];  // of the scores of heads t and t + 4, in units of log2
};

template <int kHeadDim>
__device__ __forceinline__ void load_integer_query(const DecodeParams& p, int64_t first_head, int num_heads,
                                                   int lane, float code_unit,
                                                   QueryFragments<kHeadDim, true>& q) {
  constexpr int kChannels = kHeadDim / 4;
  const int g = lane >> 2;
  const int t = lane & 3;
  const int piece = g & 1;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int head = 4 * i + (g >> 1);
    const bool exists = head < num_heads;
    const int64_t base = (first_head + (exists ? head : 0)) * kHeadDim + t * kChannels;
    float largest = 0;
    float poison = 0;  // NaN if one channel is NaN or infinite
#pragma unroll 4
    for (int c = 0; c < kChannels; ++c) {
      const float x = exists ? load_query(p, base + c) : 0.0f;
      largest = fmaxf(largest, fabsf(x));
      poison += x * 0.0f;
    }
#pragma unroll
    for (int offset = 1; offset < 4; offset *= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
      poison += __shfl_xor_sync(0xffffffffu, poison, offset);
    }
    const float step = largest > 0 ? largest / kQuerySteps : 1.0f;
#pragma unroll
    for (int group = 0; group < kHeadDim / 32; ++group) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t packed = 0;
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const float x = exists ? load_query(p, base + 8 * group + 4 * half + c) : 0.0f;
          const int steps = __float2int_rn(fminf(fmaxf(x / step, -kQuerySteps), kQuerySteps));
          const int high = (steps + 128) >> 8;
          const int chosen = piece == 0 ? high : steps - 256 * high;
          packed |= static_cast<uint32_t>(chosen & 255) << (8 * c);
        }
        q.b[i][group][half] = packed;
      }
    }
    // The factor of head 4 * i + t stands in the lanes with g >> 1 == t.
    const float factor = step * p.score_scale * code_unit + poison;
    q.factor[i] = __shfl_sync(0xffffffffu, factor, 8 * t);
  }
}

template <typename T, int kHeadDim>
__device__ __forceinline__ void load_half_query(const DecodeParams& p, int64_t first_head, int num_heads,
                                                int lane, QueryFragments<kHeadDim, false>& q) {
  constexpr int kChannels = kHeadDim / 4;
  const int g = lane >> 2;
  const int t = lane & 3;
  const int head = (g >> 1) + 4 * (g & 1);
  const bool exists = head < num_heads;
  const int64_t base = (first_head + (exists ? head : 0)) * kHeadDim + t * kChannels;
#pragma unroll
  for (int group = 0; group < kHeadDim / 32; ++group) {
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      const int64_t at = base + 8 * group + 2 * pair;
      q.b[0][group][pair] = exists ? device::pack_pair<T>(load_query(p, at), load_query(p, at + 1)) : 0u;
    }
  }
  q.factor[0] = q.factor[1] = p.score_scale;
}

}  // namespace htree::compressed_kv
