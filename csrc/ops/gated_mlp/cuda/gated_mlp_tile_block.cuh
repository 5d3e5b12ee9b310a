// A block of the persistent kernels of this room: its memory, and who does what. One warpgroup loads, the
// others multiply 64 rows each.
#pragma once

#include <cstdint>

#include "device/hopper/gemm_pipeline.cuh"
#include "device/hopper/sum_exchange.cuh"
#include "device/hopper/tile_order.cuh"
#include "device/shared_memory.cuh"
#include "device/sizes.h"
#include "ops/gated_mlp/cuda/gated_mlp_tile_store.cuh"
#include "ops/gated_mlp/cuda/gated_mlp_tile_work.cuh"

namespace htree::gated_mlp {

// A warp stages kStaged columns of its rows for a store.
template <class Shape_, int kStaged_>
struct TileBlock {
  using Shape = Shape_;
  using T = typename Shape::T;
  static constexpr int kRows = Shape::kRowsA;
  static constexpr int kCluster = Shape::kCluster;
  static constexpr int kStaged = kStaged_;
  static constexpr int kThreads = 128 * (1 + Shape::kWarpgroups);
  static constexpr int kLoaderRegisters = 40;
  static constexpr int kMultiplierRegisters = Shape::kWarpgroups == 2 ? 232 : 152;
  static_assert(kLoaderRegisters + Shape::kWarpgroups * kMultiplierRegisters <= 504);

  struct Shared {
    device::GemmRing<Shape> ring;
    alignas(1024) StagedRows out[Shape::kWarpgroups * 4][kStaged / kStoreColumns];  // per warp
    device::SumExchange exchange[Shape::kWarpgroups];
  };
  static constexpr int kSharedBytes = sizeof(Shared) + device::kSharedAlignment;
  static_assert(kSharedBytes <= device::kHopperSharedBytes);
};

// All threads of a block, for each of its tiles: one thread calls load(work, place), which fills the ring
// from `place` on; every warp that multiplies calls store(work, warpgroup, row, d) with the sums of its 16
// rows from `row` of the tile on.
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
      for_tiles<Tr>(order, shares, [&](const TileWork& work) { load(work, place); });
    }
    __syncwarp();
  } else {
    device::raise_registers<Tr::kMultiplierRegisters>();
    const int row = warpgroup * 64 + static_cast<int>(threadIdx.x / 32 % 4) * 16;
    for_tiles<Tr>(order, shares, [&](const TileWork& work) {
      float d[Shape::kRowsB / 2];
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

}  // namespace htree::gated_mlp
