// Two blocks of a cluster that share the k of one tile each finish half of it: a warpgroup sends the other
// block its sums of that half (sm_90). Once per launch, for the last tile of a block.
#pragma once

#include <cstdint>

#include "device/hopper/cluster_memory.cuh"
#include "device/hopper/mbarrier.cuh"

namespace htree::device {

// Of a warpgroup.
struct SumExchange {
  Barrier is_free;   // the places for sums of the same warpgroup of the other block
  Barrier has_sums;  // its own
};

// One thread, before fence_barrier_init() and a sync of the cluster.
__device__ __forceinline__ void init_exchange(SumExchange& exchange) {
  barrier_init(&exchange.is_free, 4);
  barrier_init(&exchange.has_sums, 4);
}

// One thread of each of the four warps: the other block may send the warp its `bytes`, to be waited for at
// `has_sums`. The other block waits at `is_free` before it sends.
__device__ __forceinline__ void offer_places(SumExchange& exchange, uint32_t bytes, uint32_t other_block) {
  barrier_arrive_expect(&exchange.has_sums, bytes);
  barrier_arrive_remote(&exchange.is_free, other_block);
}

}  // namespace htree::device
