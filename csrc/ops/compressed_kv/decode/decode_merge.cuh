// The end of a block of the decode kernel: it merges its warps and its share of the dense window, and then
// the blocks of a cluster merge.
#pragma once

#include <cstdint>

#include "device/hopper/cluster_memory.cuh"
#include "device/hopper/mbarrier.cuh"
#include "ops/compressed_kv/decode/decode_result.cuh"
#include "ops/compressed_kv/decode/decode_softmax.cuh"
#include "ops/compressed_kv/decode/decode_split.cuh"
#include "ops/compressed_kv/decode/decode_window.cuh"

namespace htree::compressed_kv {

// The sums of the warps of a block, relative to the block's maxima.
template <typename Tr>
struct BlockMerge {
  float acc[Tr::kMaxWarps][kHeadsPerBlock][Tr::kD];
  float max[Tr::kMaxWarps][kHeadsPerBlock];  // in units of log2
  float sum[Tr::kMaxWarps][kHeadsPerBlock];
  float top[kHeadsPerBlock];                         // the largest of these
  uint32_t poison[Tr::kMaxWarps][4][Tr::kOwnWords];  // read only where some warp has set a bit
};

// What a block leaves for the other blocks of its cluster.
template <int kHeadDim>
struct SplitPart {
  float acc[kHeadsPerBlock][kHeadDim];
  float max[kHeadsPerBlock];  // in units of log2
  float sum[kHeadsPerBlock];
};

// Stores `result` of every warp in shared memory. Returns whether any warp poisons a channel. Costs one
// __syncthreads and needs another before `shared` is read.
template <typename Tr>
__device__ __forceinline__ bool collect_warps(BlockMerge<Tr>& shared, const WindowPart<Tr::kD>* window,
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
    for (int i = 0; i < Tr::kOwnWords; ++i) {
      result.poison[i] |= __shfl_xor_sync(0xffffffffu, result.poison[i], offset);
    }
  }
  uint32_t poison = 0;
#pragma unroll
  for (int i = 0; i < Tr::kOwnWords; ++i) {
    poison |= result.poison[i];
    if (g == 0) {
      shared.poison[warp][t][i] = result.poison[i];
    }
  }
  if (g == 0) {
#pragma unroll
    for (int i = 0; i < Tr::kHeadPairs; ++i) {
      shared.max[warp][t + 4 * i] = state.max(i);
    }
  }
  // 16-bit values poison nothing, and the code must say so here. Where ptxas knows the outcome of a barrier,
  // it puts another barrier where that outcome is used: in a loop that some warps run more often than others.
  bool poisoned = false;
  if constexpr (Tr::kV == 16) {
    __syncthreads();
  } else {
    poisoned = __syncthreads_or(poison != 0) != 0;
  }
  const float code_unit = Tr::kV == 16 ? 1.0f : state.unit;
  float factor[Tr::kHeadPairs];
#pragma unroll
  for (int i = 0; i < Tr::kHeadPairs; ++i) {
    const int head = t + 4 * i;
    float top = window != nullptr ? window->max[head] : kMinusInfinity;
    for (int w = 0; w < num_warps; ++w) {
      top = fmaxf(top, shared.max[w][head]);
    }
    const float own = state.max(i);
    factor[i] = own == kMinusInfinity ? 1.0f : device::exp2_flushed(own - top);
    if (g == 0) {
      shared.sum[warp][head] = state.sum[i] * factor[i];
      if (warp == 0) {
        shared.top[head] = top;
      }
    }
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
  return poisoned;
}

// The sum of one head and channel over a block.
struct BlockSum {
  float value;
  float top;  // in units of log2
  float total;
};

template <typename Tr>
__device__ __forceinline__ BlockSum sum_warps(const BlockMerge<Tr>& shared, const WindowPart<Tr::kD>* window,
                                              bool poisoned, int num_warps, int head, int channel) {
  BlockSum sum = {0.0f, shared.top[head], 0.0f};
#pragma unroll 4
  for (int w = 0; w < num_warps; ++w) {
    sum.total += shared.sum[w][head];
    sum.value += shared.acc[w][head][channel];
  }
  if (window != nullptr) {
    const float factor = part_factor(window->max[head], sum.top);
    sum.total += window->sum[head] * factor;
    sum.value += window->acc[head][channel] * factor;
  }
  if (poisoned) {
    const int group = channel / 32;
    uint32_t poison = 0;
    for (int w = 0; w < num_warps; ++w) {
      poison |= shared.poison[w][channel % 32 / 8][group / 4] >> (8 * (group % 4) + channel % 8);
    }
    sum.value = (poison & 1) != 0 ? NAN : sum.value;
  }
  return sum;
}

// The sum of one head and channel over the blocks of a cluster, in their order.
template <int kHeadDim>
__device__ __forceinline__ BlockSum sum_blocks(const SplitPart<kHeadDim>& part, int num_blocks, int head,
                                               int channel) {
  BlockSum sum = {0.0f, kMinusInfinity, 0.0f};
#if __CUDA_ARCH__ >= 900
  // The loads of all blocks come first, so that their latencies overlap. Absent blocks weigh nothing.
  float max[kMostClusterSplits];
  float weights[kMostClusterSplits];
  float value[kMostClusterSplits];
#pragma unroll
  for (int block = 0; block < kMostClusterSplits; ++block) {
    const bool present = block < num_blocks;
    max[block] = present ? device::load_from_block(&part.max[head], block) : kMinusInfinity;
    weights[block] = present ? device::load_from_block(&part.sum[head], block) : 0.0f;
    value[block] = present ? device::load_from_block(&part.acc[head][channel], block) : 0.0f;
  }
#pragma unroll
  for (int block = 0; block < kMostClusterSplits; ++block) {
    sum.top = fmaxf(sum.top, max[block]);
  }
#pragma unroll
  for (int block = 0; block < kMostClusterSplits; ++block) {
    const float factor = part_factor(max[block], sum.top);
    sum.total += weights[block] * factor;
    sum.value += weights[block] == 0.0f ? 0.0f : value[block] * factor;
  }
#endif
  return sum;
}

// Merges the parts of the blocks of a cluster. The blocks share out the channels.
template <int kHeadDim>
__device__ __forceinline__ void merge_cluster(const DecodeParams& p, const Split& s,
                                              SplitPart<kHeadDim>& part) {
#if __CUDA_ARCH__ >= 900
  __syncwarp();
  device::cluster_sync();
  for (int i = s.index * blockDim.x + threadIdx.x; i < s.num_heads * kHeadDim;
       i += p.splits.launched * blockDim.x) {
    const int head = i / kHeadDim;
    const int channel = i % kHeadDim;
    const BlockSum sum = sum_blocks(part, p.splits.launched, head, channel);
    const int64_t row = s.first_head + head;
    store_output(p.output.out, p.output.type, row * kHeadDim + channel, sum.value, sum.total);
    if (channel == 0) {
      p.output.lse[row] = log_sum_exp(sum.top, sum.total);
    }
  }
  __syncwarp();
  device::cluster_sync();  // no block leaves while another may still read its part
#endif
}

// `shared` and `part` lie in shared memory that is free, and do not overlap. `window` is null
// where there is none.
template <typename Tr>
__device__ __forceinline__ void finish_block(const DecodeParams& p, const Split& s, BlockMerge<Tr>& shared,
                                             SplitPart<Tr::kD>& part, const WindowPart<Tr::kD>* window,
                                             WarpResult<Tr>& result, int warp, int num_warps, int lane) {
  const bool poisoned = collect_warps(shared, window, result, warp, num_warps, lane);
  __syncthreads();
  for (int i = threadIdx.x; i < s.num_heads * Tr::kD; i += blockDim.x) {
    const int head = i / Tr::kD;
    const int channel = i % Tr::kD;
    const BlockSum sum = sum_warps(shared, window, poisoned, num_warps, head, channel);
    const int64_t row = s.first_head + head;
    if (p.output.ending == Ending::kResult) {
      store_output(p.output.out, p.output.type, row * Tr::kD + channel, sum.value, sum.total);
      if (channel == 0) {
        p.output.lse[row] = log_sum_exp(sum.top, sum.total);
      }
    } else if (p.output.ending == Ending::kCluster) {
      part.acc[head][channel] = sum.value;
      if (channel == 0) {
        part.max[head] = sum.top;
        part.sum[head] = sum.total;
      }
    } else {
      const int64_t at = row * p.splits.parts + p.splits.first_part + s.index;
      p.parts.acc[at * Tr::kD + channel] = sum.value;
      if (channel == 0) {
        p.parts.max[at] = sum.top;
        p.parts.sum[at] = sum.total;
      }
    }
  }
  if (p.output.ending == Ending::kCluster) {
    merge_cluster(p, s, part);
  }
}

}  // namespace htree::compressed_kv
