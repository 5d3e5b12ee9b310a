// A block of this family's persistent kernels: its memory, and which warps do what. One warpgroup is the producer, which
// loads; the others are consumers, which multiply 64 rows each, or a multiple of it.
#pragma once

#include <cstdint>

#include "device/shared_memory.cuh"
#include "device/sizes.h"
#include "device/sm90/dsmem_reduction.cuh"
#include "device/sm90/gemm_pipeline.cuh"
#include "device/sm90/tile_order.cuh"
#include "ops/gated_mlp/cuda/sm90/gated_mlp_tile_store.cuh"

namespace htree::gated_mlp {

// A warp's buffer to lay out kStaged columns of its rows for a store.
template <int kWarps, int kStaged>
struct StagedTiles {
  alignas(1024) StagedRows out[kWarps][kStaged / kStoreColumns];
};
template <int kWarps>
struct StagedTiles<kWarps, 0> {};

// kStaged is 0 where warps store from registers.
template <class Shape_, int kStaged_>
struct TileBlock {
  using Shape = Shape_;
  using T = typename Shape::T;
  static constexpr int kRows =
      Shape::kRowsA;  // of a tile; a kernel of two products per tile has half of them
  static constexpr int kCluster = Shape::kCluster;
  static constexpr int kStaged = kStaged_;
  static constexpr int kThreads = 128 * (1 + Shape::kWarpgroups);
  static constexpr int kProducerRegisters = 40;
  static constexpr int kConsumerRegisters = Shape::kWarpgroups == 2 ? 232 : 152;
  static_assert(kProducerRegisters + Shape::kWarpgroups * kConsumerRegisters <= 504);

  struct Shared : StagedTiles<Shape::kWarpgroups * 4, kStaged> {
    device::GemmRing<Shape> ring;
    device::DsmemReduction reduction[Shape::kWarpgroups];
  };
  static constexpr int kSharedBytes = sizeof(Shared) + device::kSharedAlignment;
  static_assert(kSharedBytes <= device::kHopperSharedBytes);
};

// Calls visit(work) for the block's tiles, one after the other. `order` counts the tiles of clusters, whose
// blocks stand one below the other; `split` counts the tiles of blocks.
template <class Tr, class Visit>
__device__ __forceinline__ void for_tiles(const device::TileOrder& order, const device::SplitTiles& split,
                                          Visit&& visit) {
  const int rank = static_cast<int>(blockIdx.x) % Tr::kCluster;  // known to be the same in all lanes
  const int cluster = static_cast<int>(blockIdx.x) / Tr::kCluster;
  device::TileWork work{0, 0, 0, split.num_blocks, false};
  for (int wave = 0; wave < order.count() * Tr::kCluster; wave += gridDim.x) {
    int tile = wave / Tr::kCluster + cluster;
    int row_in_cluster = rank;
    if constexpr (Tr::kCluster == 2) {
      if (wave == split.first_split) {
        tile = wave / 2 + cluster / 2;
        row_in_cluster = cluster % 2;
        work.take_half(split, rank);
      }
    }
    if (tile < order.count()) {
      int row_tile, column_tile;
      order.place(tile, row_tile, column_tile);
      work.row = (row_tile * Tr::kCluster + row_in_cluster) * Tr::kRows;
      work.column = column_tile * Tr::kColumns;
      visit(work);
    }
  }
}

// Every thread of the block calls it. For each tile, one thread calls load(work, place), which fills the ring
// from `place` on, and every consumer warp calls store(work, warpgroup, row, d) with the sums of its
// 16 rows, which begin at row `row` of the tile.
template <class Tr, class Load, class Store>
__device__ __forceinline__ void run_tiles(typename Tr::Shared& shared, const device::TileOrder& order,
                                          const device::SplitTiles& split, Load&& load, Store&& store) {
  using Shape = typename Tr::Shape;
  if (threadIdx.x == 0) {
    device::init_ring(shared.ring);
    for (int i = 0; i < Shape::kWarpgroups; ++i) {
      device::init_reduction(shared.reduction[i]);
    }
    device::fence_barrier_init();
  }
  if constexpr (Tr::kCluster > 1) {
    device::cluster_sync();
  } else {
    __syncthreads();
  }

  const int warpgroup = device::uniform(static_cast<int>(threadIdx.x / 128)) - 1;
  device::RingPlace<Shape::kStages> place;
  if (warpgroup < 0) {
    device::lower_registers<Tr::kProducerRegisters>();
    if (threadIdx.x == 0) {
      for_tiles<Tr>(order, split, [&](const device::TileWork& work) { load(work, place); });
    }
    __syncwarp();
  } else {
    device::raise_registers<Tr::kConsumerRegisters>();
    const int row = warpgroup * 64 + static_cast<int>(threadIdx.x / 32 % 4) * 16;
    for_tiles<Tr>(order, split, [&](const device::TileWork& work) {
      float d[Shape::kParts * Shape::kRowsB / 2];
      device::multiply_ring<Shape>(shared.ring, place, work.count, warpgroup, d);
      store(work, warpgroup, row, d);
    });
    if (threadIdx.x % 32 == 0) {
      device::wait_stores<0>();
    }
    __syncwarp();
  }
  if constexpr (Tr::kCluster > 1) {
    device::cluster_sync();  // no block leaves while another may still signal its barriers
  }
}

// Where the sums of the other block arrive: where the warpgroup's rows of the first operand stood, whose
// products are done.
template <class Tr>
struct SumPlaces {
  static constexpr int kRowBytes = Tr::Shape::kParts * 64 * device::kBlockBytes;
  static constexpr int kPacksPerStage = kRowBytes / (128 * 16);
  typename Tr::Shared& shared;
  int warpgroup;

  // This thread's pack.
  __device__ __forceinline__ float4* operator()(int pack) const {
    uint8_t* rows = shared.ring.a[pack / kPacksPerStage] + warpgroup * kRowBytes;
    return reinterpret_cast<float4*>(rows) + pack % kPacksPerStage * 128 + threadIdx.x % 128;
  }
};

// Sends the other block its half of the sums d of a tile that is split along K, and receives this block's, for kResults
// results side by side (g and u, or one).
// Returns what this block's half of d lacks: the sum number i % 4 of its pack i / 4.
template <class Tr, int kResults, int kSums>
__device__ __forceinline__ SumPlaces<Tr> receive_sums(typename Tr::Shared& shared, int rank, int warpgroup,
                                                      const float (&d)[kSums]) {
  using Halves = device::SumHalves<kResults, kSums>;
  static_assert(Halves::kPacks <= SumPlaces<Tr>::kPacksPerStage * Tr::Shape::kStages);
  const SumPlaces<Tr> places{shared, warpgroup};
  device::DsmemReduction& reduction = shared.reduction[warpgroup];
  if (threadIdx.x % 32 == 0) {
    device::expect_sums(reduction, 32 * Halves::kPacks * sizeof(float4), static_cast<uint32_t>(rank ^ 1));
  }
  __syncwarp();
  device::send_and_await_halves<kResults>(reduction, rank, places, d);
  return places;
}

// The same, and leaves the whole sums of this block's half in `own`.
template <class Tr, int kResults, int kSums>
__device__ __forceinline__ void reduce_sums(typename Tr::Shared& shared, int rank, int warpgroup,
                                            const float (&d)[kSums], float (&own)[kSums / 2]) {
  using Halves = device::SumHalves<kResults, kSums>;
  const SumPlaces<Tr> places = receive_sums<Tr, kResults>(shared, rank, warpgroup, d);
#pragma unroll
  for (int pack = 0; pack < Halves::kPacks; ++pack) {
    const float4 sums = *places(pack);
    const float other[4] = {sums.x, sums.y, sums.z, sums.w};
    const int left = Halves::left(pack);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      own[pack * 4 + i] = (rank == 0 ? d[left + i] : d[left + Halves::kHalf + i]) + other[i];
    }
  }
}

}  // namespace htree::gated_mlp
