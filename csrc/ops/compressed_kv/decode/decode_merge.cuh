// The end of a block of the decode kernel: it merges its warps and its share of the dense window, and then
// the blocks of a cluster merge. They send each other their sums: that takes no fence for the whole device,
// which costs a microsecond with each synchronisation of the cluster.
#pragma once

#include <cstdint>

#include "device/sm90/cluster_memory.cuh"
#include "device/sm90/mbarrier.cuh"
#include "ops/compressed_kv/decode/decode_config.h"
#include "ops/compressed_kv/decode/decode_result.cuh"
#include "ops/compressed_kv/decode/decode_softmax.cuh"
#include "ops/compressed_kv/decode/decode_split.cuh"
#include "ops/compressed_kv/decode/decode_window.cuh"

namespace htree::compressed_kv {

// The sums of the warps of a block, relative to the block's maxima.
template <typename Tr>
struct BlockMerge {
  static constexpr int kRow = Tr::kD + (Tr::ValueRuns::kLong ? Tr::kD / 4 : 0) + 8;
  float acc[Tr::kMaxWarps][4 * Tr::kHeadPairs][kRow];
  float max[Tr::kMaxWarps][kHeadsPerBlock];  // in units of log2
  float sum[Tr::kMaxWarps][kHeadsPerBlock];
  float top[kHeadsPerBlock];                         // the largest of these
  uint32_t poison[Tr::kMaxWarps][4][Tr::kOwnWords];  // read only where some warp has set a bit

  // Where the sum of a channel stands in the row of a head. The lanes of one store have channels of four heads,
  // and so they share out the banks.
  __device__ static constexpr int place_of(int head, int channel) {
    const int shift = Tr::kV == 16 ? 2 * (head & 3) : (head & 1) + 2 * (head & 2);
    return channel + (Tr::ValueRuns::kLong ? channel / 32 * 8 : 0) + shift;
  }
};

// What the blocks of a cluster send each other. The heads and channels of a group, 32 at a time, are dealt to
// the blocks in order: each block finishes its own.
template <int kHeadDim>
struct ClusterInbox {
  static constexpr int kMostSums = kHeadsPerBlock * kHeadDim + 32 * kMostClusterSplits;  // of all blocks
  device::Barrier full;
  float max[kMostClusterSplits][kHeadsPerBlock];  // of each block, in units of log2
  float sum[kMostClusterSplits][kHeadsPerBlock];
  float acc[kMostSums];

  // Sums that block `rank` of `blocks` finishes.
  __device__ static int share_of(int num_sums, int rank, int blocks) {
    return 32 * ((num_sums / 32 - rank + blocks - 1) / blocks);
  }
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
        shared.acc[warp][t + 4 * (c & 1)][BlockMerge<Tr>::place_of(t, channel_of<Tr>(g, index, c))] =
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
    sum.value += shared.acc[w][head][BlockMerge<Tr>::place_of(head, channel)];
  }
  if (window != nullptr) {
    const float factor = part_factor(window->max[head], sum.top);
    sum.total += window->sum[head] * factor;
    sum.value += window->acc[head][channel] * factor;
  }
  if (poisoned) {
    const int group = Tr::ValueRuns::group_of(channel);
    uint32_t poison = 0;
    for (int w = 0; w < num_warps; ++w) {
      poison |=
          shared.poison[w][Tr::ValueRuns::lane_of(channel)][group / 4] >> (8 * (group % 4) + channel % 8);
    }
    sum.value = (poison & 1) != 0 ? NAN : sum.value;
  }
  return sum;
}

// Makes the inbox ready, where the selector tables were. Every thread of the block must call, once the block
// needs the tables no more. Others may send when all blocks of the cluster have called and they have waited
// for the cluster.
template <int kHeadDim>
__device__ __forceinline__ void open_inbox(ClusterInbox<kHeadDim>& inbox, const DecodeParams& p,
                                           const Split& s) {
#if __CUDA_ARCH__ >= 900
  if (threadIdx.x == 0) {
    const int blocks = p.splits.launched;
    const int sums = ClusterInbox<kHeadDim>::share_of(s.num_heads * kHeadDim, s.index, blocks);
    device::barrier_init(&inbox.full, 1);
    device::fence_barrier_init();
    device::barrier_arrive_expect(&inbox.full, static_cast<uint32_t>(blocks * (sums + 2 * s.num_heads) * 4));
  }
  __syncwarp();
  device::cluster_arrive_relaxed();
#endif
}

// Sends the sum of one head and channel of this block to the block that finishes it.
template <int kHeadDim>
__device__ __forceinline__ void send_sum(ClusterInbox<kHeadDim>& inbox, const DecodeParams& p, const Split& s,
                                         int head, int channel, const BlockSum& sum) {
#if __CUDA_ARCH__ >= 900
  const auto blocks = static_cast<unsigned>(p.splits.launched);
  const unsigned chunk = static_cast<unsigned>(head * kHeadDim + channel) / 32;
  const unsigned to = chunk % blocks;
  const int share =
      ClusterInbox<kHeadDim>::share_of(s.num_heads * kHeadDim, static_cast<int>(to), p.splits.launched);
  float* const place = &inbox.acc[s.index * share + 32 * (chunk / blocks) + channel % 32];
  device::send_to_block(place, &inbox.full, to, sum.value);
  if (channel < p.splits.launched) {
    device::send_to_block(&inbox.max[s.index][head], &inbox.full, channel, sum.top);
    device::send_to_block(&inbox.sum[s.index][head], &inbox.full, channel, sum.total);
  }
#endif
}

// The sum of one head and channel over the blocks of a cluster, in their order. `from` is the sum of the
// first block; those of the others are `step` apart.
template <int kHeadDim>
__device__ __forceinline__ BlockSum sum_blocks(const ClusterInbox<kHeadDim>& inbox, const float* from,
                                               int step, int num_blocks, int head) {
  BlockSum sum = {0.0f, kMinusInfinity, 0.0f};
  // The loads of all blocks come first, so that their latencies overlap. Absent blocks weigh nothing.
  float max[kMostClusterSplits];
  float weights[kMostClusterSplits];
  float value[kMostClusterSplits];
#pragma unroll
  for (int block = 0; block < kMostClusterSplits; ++block) {
    const bool present = block < num_blocks;
    max[block] = present ? inbox.max[block][head] : kMinusInfinity;
    weights[block] = present ? inbox.sum[block][head] : 0.0f;
    value[block] = present ? from[block * step] : 0.0f;
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
  return sum;
}

// Merges what the blocks of a cluster have sent, and stores this block's share of the results.
template <int kHeadDim>
__device__ __forceinline__ void merge_cluster(ClusterInbox<kHeadDim>& inbox, const DecodeParams& p,
                                              const Split& s) {
#if __CUDA_ARCH__ >= 900
  device::barrier_wait(&inbox.full, 0);
  const int blocks = p.splits.launched;
  const int share = ClusterInbox<kHeadDim>::share_of(s.num_heads * kHeadDim, s.index, blocks);
  for (int i = threadIdx.x; i < share; i += blockDim.x) {
    const int place = 32 * (i / 32 * blocks + s.index) + i % 32;
    const int head = place / kHeadDim;
    const int channel = place % kHeadDim;
    const BlockSum sum = sum_blocks(inbox, &inbox.acc[i], share, blocks, head);
    const int64_t row = s.first_head + head;
    store_output(p.output.out, p.output.type, row * kHeadDim + channel, sum.value, sum.total);
    if (channel == 0) {
      p.output.lse[row] = log_sum_exp(sum.top, sum.total);
    }
  }
#endif
}

// `shared` and `inbox` lie in shared memory that is free, and do not overlap. `window` is null
// where there is none.
template <typename Tr>
__device__ __forceinline__ void finish_block(const DecodeParams& p, const Split& s, BlockMerge<Tr>& shared,
                                             ClusterInbox<Tr::kD>& inbox, const WindowPart<Tr::kD>* window,
                                             WarpResult<Tr>& result, int warp, int num_warps, int lane) {
  const bool in_cluster = p.output.ending == Ending::kCluster;
  if (in_cluster) {
    open_inbox(inbox, p, s);
  }
  const bool poisoned = collect_warps(shared, window, result, warp, num_warps, lane);
  __syncthreads();
#if __CUDA_ARCH__ >= 900
  if (in_cluster) {
    device::cluster_wait();
  }
#endif
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
    } else if (in_cluster) {
      send_sum(inbox, p, s, head, channel, sum);
    } else {
      const int64_t at = row * p.splits.parts + p.splits.first_part + s.index;
      p.parts.acc[at * Tr::kD + channel] = sum.value;
      if (channel == 0) {
        p.parts.max[at] = sum.top;
        p.parts.sum[at] = sum.total;
      }
    }
  }
  if (in_cluster) {
    merge_cluster(inbox, p, s);
  }
}

}  // namespace htree::compressed_kv
