// Reduction over distributed shared memory, DSMEM (sm_90). Where a tile is split along K over the two blocks of a
// cluster, each finishes half of the tile: a warpgroup sends its partial sums of the other half to the other block.
// That happens once per launch, in the stream-K tail: for the last tile of a block.
#pragma once

#include <cstdint>

#include "device/sm90/cluster_memory.cuh"
#include "device/sm90/mbarrier.cuh"

namespace htree::device {

// Barriers of a warpgroup.
struct DsmemReduction {
  Barrier is_free;   // the same warpgroup of the other block has space for sums
  Barrier has_sums;  // sums have arrived here
};

// One thread calls it, before fence_barrier_init() and a synchronisation of the cluster.
__device__ __forceinline__ void init_reduction(DsmemReduction& reduction) {
  barrier_init(&reduction.is_free, 4);
  barrier_init(&reduction.has_sums, 4);
}

// One thread of each of the four warps calls it: the other block may now send the warp its `bytes`, whose
// arrival `has_sums` counts. The other block waits at its `is_free` before it sends them.
__device__ __forceinline__ void expect_sums(DsmemReduction& reduction, uint32_t bytes, uint32_t other_block) {
  barrier_arrive_expect(&reduction.has_sums, bytes);
  barrier_arrive_remote(&reduction.is_free, other_block);
}

// The sums d of a thread, for kResults results side by side, in packs of four. The first sum of a pack
// belongs to the left half of the columns, the one kHalf further on to the right half.
template <int kResults, int kSums>
struct SumHalves {
  static constexpr int kHalf = kSums / (2 * kResults);  // sums per result that a thread's block finishes
  static constexpr int kPacks = kSums / 8;
  static_assert(kHalf % 4 == 0);
  __device__ static constexpr int left(int pack) { return pack * 4 + pack * 4 / kHalf * kHalf; }
};

// Sends the other block of the cluster its half of the columns of each result, and returns when its sums for
// this block's half have arrived. Rank 0 finishes the left half. place(pack) is where this thread's pack
// arrives, in both blocks; the caller has called expect_sums().
template <int kResults, int kSums, class Place>
__device__ __forceinline__ void send_and_await_halves(DsmemReduction& reduction, int rank, Place&& place,
                                                      const float (&d)[kSums]) {
  using Halves = SumHalves<kResults, kSums>;
  barrier_wait(&reduction.is_free, 0);
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
    send_to_block(place(pack), &reduction.has_sums, static_cast<uint32_t>(rank ^ 1), sums);
  }
  barrier_wait(&reduction.has_sums, 0);
}

}  // namespace htree::device
