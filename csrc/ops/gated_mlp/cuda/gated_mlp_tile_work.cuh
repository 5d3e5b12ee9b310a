// Which tiles a block of tile_kernel takes, and how much of each.
#pragma once

#include "device/hopper/tile_order.cuh"

namespace htree::gated_mlp {

// What a block does of a tile: k-blocks first ... first + count - 1.
struct TileWork {
  int row;  // of the results
  int column;
  int first;
  int count;
  bool shared;  // the other block of the cluster does the rest
};

// The block's tiles, one after the other. `order` counts tiles of a cluster, whose blocks stand one below the
// other; `shares` counts those of blocks.
template <class Tr, class Visit>
__device__ __forceinline__ void for_tiles(const device::TileOrder& order, const device::TileShares& shares,
                                          Visit&& visit) {
  const int rank = static_cast<int>(blockIdx.x) % Tr::kCluster;  // known to be the same in all lanes
  const int cluster = static_cast<int>(blockIdx.x) / Tr::kCluster;
  TileWork work{0, 0, 0, shares.num_blocks, false};
  for (int turn = 0; turn < order.count() * Tr::kCluster; turn += gridDim.x) {
    int tile = turn / Tr::kCluster + cluster;
    int row_in_cluster = rank;
    if constexpr (Tr::kCluster == 2) {
      if (turn == shares.first_shared) {
        tile = turn / 2 + cluster / 2;
        row_in_cluster = cluster % 2;
        const int half = shares.num_blocks / 2;
        work.first = rank == 0 ? 0 : half;
        work.count = rank == 0 ? half : shares.num_blocks - half;
        work.shared = true;
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

}  // namespace htree::gated_mlp
