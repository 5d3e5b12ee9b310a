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

// Sums d of a thread, for kResults results side by side, in packs of four: the first one of a pack in the
// left half of the columns. kHalf further it is that in the right half.
template <int kResults, int kSums>
struct SumHalves {
  static constexpr int kHalf = kSums / (2 * kResults);  // sums of a result that a thread's block finishes
  static constexpr int kPacks = kSums / 8;
  static_assert(kHalf % 4 == 0);
  __device__ static constexpr int left(int pack) { return pack * 4 + pack * 4 / kHalf * kHalf; }
};

// Sends the other block of the cluster its half of the columns of each result, and returns when its sums of
// this block's half have arrived: rank 0 finishes the left one. place(pack) is where this thread's pack
// arrives, in both blocks; who calls has offered these places.
template <int kResults, int kSums, class Place>
__device__ __forceinline__ void exchange_halves(SumExchange& exchange, int rank, Place&& place,
                                                const float (&d)[kSums]) {
  using Halves = SumHalves<kResults, kSums>;
  barrier_wait(&exchange.is_free, 0);
#pragma unroll
  for (int pack = 0; pack < Halves::kPacks; ++pack) {
    float4 sums;
    if (rank == 0) {
      const float* right = &d[Halves::left(pack) + Halves::kHalf];
      sums = make_float4(right[0], right[1], right[2], right[3]);
    } else {
      const float* from = &d[Halves::left(pack)];
      sums = make_float4(from[0], from[1], from[2], from[3]);
    }
    send_to_block(place(pack), &exchange.has_sums, static_cast<uint32_t>(rank ^ 1), sums);
  }
  barrier_wait(&exchange.has_sums, 0);
}

}  // namespace htree::device
