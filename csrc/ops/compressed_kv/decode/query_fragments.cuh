// The query heads of a block as the right-hand operand of the products that give scores. Column n of product
// i is piece n & 1 of query head 4 * i + (n >> 1), so that lane (g, t) of a result holds both pieces of head
// 4 * i + t. With 8-bit and 4-bit keys the query is an integer of 16 bits per channel and its pieces are
// bytes, so the dot products with the codes are exact. With 16-bit keys the pieces are the query rounded to
// the type of the keys, and what that rounding leaves: a transformed query is not of that type.
#pragma once

#include <cstdint>

#include "device/mma.cuh"
#include "device/numeric.cuh"
#include "device/reduce.cuh"
#include "ops/compressed_kv/decode/decode_params.h"

namespace htree::compressed_kv {

// A channel of the query as it lies in memory.
__device__ __forceinline__ uint32_t load_query_bits(const void* q, QueryType type, int64_t index) {
  return type == QueryType::kFloat ? static_cast<const uint32_t*>(q)[index]
                                   : static_cast<const uint16_t*>(q)[index];
}
__device__ __forceinline__ uint32_t load_query_bits(const DecodeParams& p, int64_t index) {
  return load_query_bits(p.q.data, p.q.type, index);
}
__device__ __forceinline__ float query_of(uint32_t bits, QueryType type) {
  return type == QueryType::kHalf       ? __half2float(__ushort_as_half(static_cast<uint16_t>(bits)))
         : type == QueryType::kBfloat16 ? __uint_as_float(bits << 16)
                                        : __uint_as_float(bits);
}
__device__ __forceinline__ float load_query(const void* q, QueryType type, int64_t index) {
  return query_of(load_query_bits(q, type, index), type);
}

constexpr float kQuerySteps = 127 * 256;

// The query heads of a block in shared memory, on their way to the fragments.
template <int kHeadDim>
struct QueryScratch {
  float rows[kHeadsPerBlock][kHeadDim];
  int8_t pieces[2][kHeadsPerBlock][kHeadDim];
  float steps[kHeadsPerBlock];  // value of one step of the integers; NaN where a channel is NaN or infinite
};

// Lane t of a quad has the groups of eight channels that Runs says.
template <int kHeadDim, int kProducts, bool kInteger>
struct QueryFragments {
  static constexpr int kGroups = kHeadDim / 32;
  // Integers: [product][group][half of the channels]. 16 bits: [product][group][pair of channels], four of them.
  static constexpr int kRegisters = kInteger ? 2 : 4;
  uint32_t b[kProducts][kGroups][kRegisters];
  float factor[kProducts];  // for the scores of heads t and t + 4, in units of log2
};

// The first channels of the block's query heads that a thread loads, long before they are needed. They are
// converted when they are: a conversion waits.
struct EarlyQuery {
  static constexpr int kChannels = 2;
  uint32_t channel[kChannels];

  // Takes `count` channels from `first` on.
  __device__ __forceinline__ EarlyQuery(const DecodeParams& p, int64_t first, int count) {
#pragma unroll
    for (int i = 0; i < kChannels; ++i) {
      const int at = threadIdx.x + i * blockDim.x;
      channel[i] = at < count ? load_query_bits(p, first + at) : 0u;
    }
  }
};

// Stores the query heads in shared memory; rows of absent heads are zero. Every thread of the block must
// call. Costs one __syncthreads.
template <int kHeadDim>
__device__ __forceinline__ void stage_query(const DecodeParams& p, int64_t first_head, int num_heads,
                                            const EarlyQuery& early, QueryScratch<kHeadDim>& scratch) {
  float* const to = scratch.rows[0];
#pragma unroll
  for (int i = 0; i < EarlyQuery::kChannels; ++i) {
    const int at = threadIdx.x + i * blockDim.x;
    if (at < kHeadsPerBlock * kHeadDim) {
      to[at] = query_of(early.channel[i], p.q.type);
    }
  }
  for (int at = threadIdx.x + EarlyQuery::kChannels * blockDim.x; at < kHeadsPerBlock * kHeadDim;
       at += blockDim.x) {
    const uint32_t bits = at < num_heads * kHeadDim ? load_query_bits(p, first_head * kHeadDim + at) : 0u;
    to[at] = query_of(bits, p.q.type);
  }
  __syncthreads();
}

// Splits the first kHeads heads into integers, a warp per head. It comes after stage_query and needs a
// __syncthreads before the pieces are used. Every thread of the block must call.
template <int kHeads, int kHeadDim>
__device__ __forceinline__ void split_query(int warp, int num_warps, int lane,
                                            QueryScratch<kHeadDim>& scratch) {
  for (int head = warp; head < kHeads; head += num_warps) {
    const float* row = scratch.rows[head];
    float largest = 0;
    float poison = 0;
    for (int c = lane; c < kHeadDim; c += 32) {
      largest = fmaxf(largest, fabsf(row[c]));
      poison += row[c] * 0.0f;
    }
    largest = device::warp_reduce<device::Max>(largest);
    poison = device::warp_reduce<device::Sum>(poison);
    const float inverse = largest > 0 ? kQuerySteps / largest : 0.0f;
    for (int c = lane; c < kHeadDim; c += 32) {
      const int steps = __float2int_rn(fminf(fmaxf(row[c] * inverse, -kQuerySteps), kQuerySteps));
      const int high = (steps + 128) >> 8;
      scratch.pieces[0][head][c] = static_cast<int8_t>(high);
      scratch.pieces[1][head][c] = static_cast<int8_t>(steps - 256 * high);
    }
    if (lane == 0) {
      scratch.steps[head] = largest / kQuerySteps + poison;
    }
  }
}

// Comes after split_query. `code_unit` is what a code counts in the products.
template <typename R, int kHeadDim, int kProducts>
__device__ __forceinline__ void load_integer_query(const DecodeParams& p, float code_unit, int lane,
                                                   const QueryScratch<kHeadDim>& scratch,
                                                   QueryFragments<kHeadDim, kProducts, true>& q) {
  const int g = lane >> 2;
  const int t = lane & 3;
#pragma unroll
  for (int i = 0; i < kProducts; ++i) {
    const int8_t* channels = scratch.pieces[g & 1][4 * i + (g >> 1)];
#pragma unroll
    for (int group = 0; group < kHeadDim / 32; ++group) {
      const int8_t* const at = channels + R::first_channel(group, t);
      q.b[i][group][0] = *reinterpret_cast<const uint32_t*>(at);
      q.b[i][group][1] = *reinterpret_cast<const uint32_t*>(at + 4);
    }
    q.factor[i] = scratch.steps[4 * i + t] * p.score_scale * code_unit;
  }
}

// Comes after stage_query.
template <typename R, typename T, int kHeadDim, int kProducts>
__device__ __forceinline__ void load_half_query(const DecodeParams& p, int lane,
                                                const QueryScratch<kHeadDim>& scratch,
                                                QueryFragments<kHeadDim, kProducts, false>& q) {
  const int g = lane >> 2;
  const int t = lane & 3;
  const auto piece = [g](float x) {
    const T rounded = device::from_acc<T>(x);
    return (g & 1) == 0 ? x : x - device::to_acc(rounded);
  };
#pragma unroll
  for (int i = 0; i < kProducts; ++i) {
    const float* channels = scratch.rows[4 * i + (g >> 1)];
#pragma unroll
    for (int group = 0; group < kHeadDim / 32; ++group) {
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        const float* at = channels + R::first_channel(group, t) + 2 * pair;
        q.b[i][group][pair] = device::pack_pair<T>(piece(at[0]), piece(at[1]));
      }
    }
    q.factor[i] = p.score_scale;
  }
}

}  // namespace htree::compressed_kv
