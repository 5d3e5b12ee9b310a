// The end of a block of the decode kernel: the merge of its warps.
#pragma once

#include <cstdint>

#include "ops/compressed_kv/decode_softmax.cuh"
#include "ops/compressed_kv/decode_split.cuh"

namespace htree::compressed_kv {

// Sums of the warps of a block, in their order, and the block's part of the result.
template <typename Tr>
struct BlockMerge {
  float acc[Tr::kMaxWarps][kHeadsPerBlock][Tr::kD];
  float max[Tr::kMaxWarps][kHeadsPerBlock];
  float sum[Tr::kMaxWarps][kHeadsPerBlock];
  uint32_t poison[Tr::kMaxWarps][4][Tr::kWords];
};

template <typename Tr>
__device__ __forceinline__ void merge_warps(const DecodeParams& p, const Split& s, BlockMerge<Tr>& shared,
                                            WarpResult<Tr>& result, int warp, int num_warps, int lane) {
  const int g = lane >> 2;
  const int t = lane & 3;
  auto& state = result.state;
#pragma unroll
  for (int offset = 4; offset < 32; offset *= 2) {
#pragma unroll
    for (int i = 0; i < Tr::kHeadPairs; ++i) {
      state.sum[i] += __shfl_xor_sync(0xffffffffu, state.sum[i], offset);
    }
#pragma unroll
    for (int i = 0; i < Tr::kWords; ++i) {
      result.poison[i] |= __shfl_xor_sync(0xffffffffu, result.poison[i], offset);
    }
  }
  if (g == 0) {
#pragma unroll
    for (int i = 0; i < Tr::kHeadPairs; ++i) {
      shared.max[warp][t + 4 * i] = state.max[i];
      shared.sum[warp][t + 4 * i] = state.sum[i];
    }
#pragma unroll
    for (int i = 0; i < Tr::kWords; ++i) {
      shared.poison[warp][t][i] = result.poison[i];
    }
  }
  __syncthreads();
  const float code_unit = Tr::kV == 16 ? 1.0f : state.unit;
  float factor[Tr::kHeadPairs];
#pragma unroll
  for (int i = 0; i < Tr::kHeadPairs; ++i) {
    float top = kMinusInfinity;
    for (int w = 0; w < num_warps; ++w) {
      top = fmaxf(top, shared.max[w][t + 4 * i]);
    }
    factor[i] = state.max[i] == kMinusInfinity ? 1.0f : device::exp2_flushed(state.max[i] - top);
    factor[i] *= code_unit;
  }
#pragma unroll
  for (int index = 0; index < 2 * Tr::kGroups; ++index) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      if (c % 2 < Tr::kHeadPairs) {
        shared.acc[warp][t + 4 * (c & 1)][channel_of<Tr>(g, index, c)] =
            result.acc[index][c] * factor[c % Tr::kHeadPairs];
      }
    }
  }
  __syncthreads();
  const int64_t part = p.first_part + s.index;
  for (int i = threadIdx.x; i < s.num_heads * Tr::kD; i += blockDim.x) {
    const int head = i / Tr::kD;
    const int channel = i % Tr::kD;
    constexpr int kChannels = Tr::kD / 4;
    float sum = 0;
    uint32_t poison = 0;
    for (int w = 0; w < num_warps; ++w) {
      sum += shared.acc[w][head][channel];
      poison |= shared.poison[w][channel / kChannels][channel % kChannels / 32] >> (channel % kChannels % 32);
    }
    const int64_t out = (s.first_head + head) * static_cast<int64_t>(p.num_parts) + part;
    p.part_acc[out * Tr::kD + channel] = (poison & 1) != 0 ? NAN : sum;
    if (channel == 0) {
      float top = kMinusInfinity;
      float total = 0;
      for (int w = 0; w < num_warps; ++w) {
        top = fmaxf(top, shared.max[w][head]);
      }
      for (int w = 0; w < num_warps; ++w) {
        const float max = shared.max[w][head];
        total += shared.sum[w][head] * (max == kMinusInfinity ? 1.0f : device::exp2_flushed(max - top));
      }
      p.part_max[out] = top;
      p.part_sum[out] = total;
    }
  }
}

}  // namespace htree::compressed_kv
