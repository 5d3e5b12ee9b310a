// A block of this room's persistent kernels: its memory, and which warps do what. One warpgroup loads, the
// others multiply 64 rows each, or a multiple of it.
#pragma once

#include <cstdint>

#include "device/hopper/gemm_pipeline.cuh"
#include "device/hopper/sum_exchange.cuh"
#include "device/hopper/tile_order.cuh"
#include "device/shared_memory.cuh"
#include "device/sizes.h"
#include "ops/gated_mlp/cuda/gated_mlp_tile_store.cuh"

namespace htree::gated_mlp {

// A warp's room to lay out kStaged columns of its rows for a store.
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
  static constexpr int kLoaderRegisters = 40;
  static constexpr int kMultiplierRegisters = Shape::kWarpgroups == 2 ? 232 : 152;
  static_assert(kLoaderRegisters + Shape::kWarpgroups * kMultiplierRegisters <= 504);

  struct Shared : StagedTiles<Shape::kWarpgroups * 4, kStaged> {
    device::GemmRing<Shape> ring;
    device::SumExchange exchange[Shape::kWarpgroups];
  };
  static constexpr int kSharedBytes = sizeof(Shared) + device::kSharedAlignment;
  static_assert(kSharedBytes <= device::kHopperSharedBytes);
};

// Calls visit(work) for the block's tiles, one after the other. `order` counts the tiles of clusters, whose
// blocks stand one below the other; `shares` counts the tiles of blocks.
template <class Tr, class Visit>
__device__ __forceinline__ void for_tiles(const device::TileOrder& order, const device::TileShares& shares,
                                          Visit&& visit) {
  const int rank = static_cast<int>(blockIdx.x) % Tr::kCluster;  // known to be the same in all lanes
  const int cluster = static_cast<int>(blockIdx.x) / Tr::kCluster;
  device::TileWork work{0, 0, 0, shares.num_blocks, false};
  for (int wave = 0; wave < order.count() * Tr::kCluster; wave += gridDim.x) {
    int tile = wave / Tr::kCluster + cluster;
    int row_in_cluster = rank;
    if constexpr (Tr::kCluster == 2) {
      if (wave == shares.first_shared) {
        tile = wave / 2 + cluster / 2;
        row_in_cluster = cluster % 2;
        work.take_half(shares, rank);
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
// from `place` on, and every warp that multiplies calls store(work, warpgroup, row, d) with the sums of its
// 16 rows, which begin at row `row` of the tile.
template <class Tr, class Load, class Store>
__device__ __forceinline__ void run_tiles(typename Tr::Shared& shared, const device::TileOrder& order,
                                          const device::TileShares& shares, Load&& load, Store&& store) {
  using Shape = typename Tr::Shape;
  if (threadIdx.x == 0) {
    device::init_ring(shared.ring);
    for (int i = 0; i < Shape::kWarpgroups; ++i) {
      device::init_exchange(shared.exchange[i]);
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
    device::lower_registers<Tr::kLoaderRegisters>();
    if (threadIdx.x == 0) {
      for_tiles<Tr>(order, shares, [&](const device::TileWork& work) { load(work, place); });
    }
    __syncwarp();
  } else {
    device::raise_registers<Tr::kMultiplierRegisters>();
    const int row = warpgroup * 64 + static_cast<int>(threadIdx.x / 32 % 4) * 16;
    for_tiles<Tr>(order, shares, [&](const device::TileWork& work) {
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

// Exchanges the sums d of a tile that two blocks share, for kResults results side by side (g and u, or one).
// Returns what this block's half of d lacks: the sum number i % 4 of its pack i / 4.
template <class Tr, int kResults, int kSums>
__device__ __forceinline__ SumPlaces<Tr> exchange_sums(typename Tr::Shared& shared, int rank, int warpgroup,
                                                       const float (&d)[kSums]) {
  using Halves = device::SumHalves<kResults, kSums>;
  static_assert(Halves::kPacks <= SumPlaces<Tr>::kPacksPerStage * Tr::Shape::kStages);
  const SumPlaces<Tr> places{shared, warpgroup};
  device::SumExchange& exchange = shared.exchange[warpgroup];
  if (threadIdx.x % 32 == 0) {
    device::offer_places(exchange, 32 * Halves::kPacks * sizeof(float4), static_cast<uint32_t>(rank ^ 1));
  }
  __syncwarp();
  device::exchange_halves<kResults>(exchange, rank, places, d);
  return places;
}

// The same, and leaves the whole sums of this block's half in `own`.
template <class Tr, int kResults, int kSums>
__device__ __forceinline__ void share_sums(typename Tr::Shared& shared, int rank, int warpgroup,
                                           const float (&d)[kSums], float (&own)[kSums / 2]) {
  using Halves = device::SumHalves<kResults, kSums>;
  const SumPlaces<Tr> places = exchange_sums<Tr, kResults>(shared, rank, warpgroup, d);
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
