// The sums of a tile that two blocks of tile_kernel share.
#pragma once

#include <cstdint>

#include "device/hopper/sum_exchange.cuh"

namespace htree::gated_mlp {

// d of a thread holds its sums of kResults results side by side (g and u, or one). Sends the other block of
// the cluster its half of the columns of each and returns in `own` this block's half, summed: rank 0 finishes
// the left one. The sums arrive where the warpgroup's rows of the first operand stood, whose products are
// done.
template <class Tr, int kResults, int kSums>
__device__ __forceinline__ void exchange_halves(typename Tr::Shared& shared, int rank, int warpgroup,
                                                const float (&d)[kSums], float (&own)[kSums / 2]) {
  constexpr int kHalf = kSums / (2 * kResults);  // sums of a result that a thread's block finishes
  constexpr int kPacks = kSums / 8;
  constexpr int kPacksPerStage = 64 * device::kBlockBytes / (128 * 16);
  static_assert(kPacks <= kPacksPerStage * Tr::Shape::kStages && kHalf % 4 == 0);
  const int thread = static_cast<int>(threadIdx.x % 128);
  const uint32_t other_block = static_cast<uint32_t>(rank ^ 1);
  device::SumExchange& exchange = shared.exchange[warpgroup];
  const auto place = [&](int pack) {
    uint8_t* rows = shared.ring.a[pack / kPacksPerStage] + warpgroup * 64 * device::kBlockBytes;
    return reinterpret_cast<float4*>(rows) + pack % kPacksPerStage * 128 + thread;
  };
  // The first sum of a pack in the left half of the columns; kHalf further it is that in the right half.
  const auto left = [](int pack) { return pack * 4 + pack * 4 / kHalf * kHalf; };
  if (thread % 32 == 0) {
    device::offer_places(exchange, 32 * kPacks * sizeof(float4), other_block);
  }
  __syncwarp();
  device::barrier_wait(&exchange.is_free, 0);
#pragma unroll
  for (int pack = 0; pack < kPacks; ++pack) {
    float4 sums;
    if (rank == 0) {
      const float* right = &d[left(pack) + kHalf];
      sums = make_float4(right[0], right[1], right[2], right[3]);
    } else {
      const float* from = &d[left(pack)];
      sums = make_float4(from[0], from[1], from[2], from[3]);
    }
    device::send_to_block(place(pack), &exchange.has_sums, other_block, sums);
  }
  device::barrier_wait(&exchange.has_sums, 0);
#pragma unroll
  for (int pack = 0; pack < kPacks; ++pack) {
    const float4 sums = *place(pack);
    const float other[4] = {sums.x, sums.y, sums.z, sums.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      own[pack * 4 + i] = (rank == 0 ? d[left(pack) + i] : d[left(pack) + kHalf + i]) + other[i];
    }
  }
}

}  // namespace htree::gated_mlp
