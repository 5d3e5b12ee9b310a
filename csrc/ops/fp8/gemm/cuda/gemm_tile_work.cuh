// Which tiles a block of gemm_tile_kernel takes, and how much of each.
#pragma once

#include "device/hopper/mbarrier.cuh"
#include "device/hopper/tile_order.cuh"

namespace htree::fp8 {

// What a block does of a tile: k-blocks first ... first + count - 1.
struct TileWork {
  int row_tile;
  int column_tile;
  int first;
  int count;
  bool shared;  // the other block of the cluster does the rest
};

// The block's tiles, one after the other.
template <class Tr, class Visit>
__device__ __forceinline__ void for_tiles(const device::TileOrder& order, const device::TileShares& shares,
                                          Visit&& visit) {
  const int rank = static_cast<int>(blockIdx.x) % Tr::kBlocksPerCluster;  // known to be the same in all lanes
  const int cluster = static_cast<int>(blockIdx.x) / Tr::kBlocksPerCluster;
  TileWork work{0, 0, 0, shares.num_blocks, false};
  if constexpr (Tr::kParts == 1) {
    for (int tile = cluster; tile < order.count(); tile += gridDim.x / Tr::kCluster) {
      order.place(tile, work.row_tile, work.column_tile);
      work.column_tile = work.column_tile * Tr::kCluster + rank;
      visit(work);
    }
  } else {
    for (int turn = 0; turn < order.count(); turn += gridDim.x) {
      int tile = turn + static_cast<int>(blockIdx.x);
      if (turn == shares.first_shared) {
        tile = turn + cluster;
        const int half = shares.num_blocks / 2;
        work.first = rank == 0 ? 0 : half;
        work.count = rank == 0 ? half : shares.num_blocks - half;
        work.shared = true;
      }
      if (tile < order.count()) {
        order.place(tile, work.row_tile, work.column_tile);
        visit(work);
      }
    }
  }
}

}  // namespace htree::fp8
