// The tiles of a matrix product: the order in which persistent blocks take them, and the stream-K tail, whose tiles are
// split along K over the two blocks of a cluster.
#pragma once

#include <algorithm>
#include <cstdint>

#include "device/divmod.cuh"

namespace htree::device {

// Finds the place of a tile from its number. Runs of `group` row tiles are swept across all columns, rows
// first, so that blocks that work at the same time share rows of both operands in the L2. There are fewer
// than 2^31 tiles.
class TileOrder {
 public:
  TileOrder(int num_row_tiles, int num_column_tiles, int group)
      : num_row_tiles_(num_row_tiles),
        num_column_tiles_(num_column_tiles),
        group_(std::min(group, num_row_tiles)),
        sweep_(static_cast<uint32_t>(group_) * static_cast<uint32_t>(num_column_tiles)),
        rows_(static_cast<uint32_t>(group_)),
        last_rows_(static_cast<uint32_t>(num_row_tiles - (num_row_tiles - 1) / group_ * group_)) {}

  __host__ __device__ int count() const { return num_row_tiles_ * num_column_tiles_; }

  __device__ __forceinline__ void place(int tile, int& row_tile, int& column_tile) const {
    const uint32_t group = sweep_.quotient(static_cast<uint32_t>(tile));
    const uint32_t in_group = sweep_.remainder(static_cast<uint32_t>(tile), group);
    const int first = static_cast<int>(group) * group_;
    const FastDivisor& rows = first + group_ <= num_row_tiles_ ? rows_ : last_rows_;
    const uint32_t column = rows.quotient(in_group);
    row_tile = first + static_cast<int>(rows.remainder(in_group, column));
    column_tile = static_cast<int>(column);
  }

 private:
  int num_row_tiles_;
  int num_column_tiles_;
  int group_;
  FastDivisor sweep_;      // tiles of a whole run
  FastDivisor rows_;       // row tiles of a whole run
  FastDivisor last_rows_;  // row tiles of the last run
};

// Which tiles a launch splits along K. The host divides, because a loop bound that the device divided would not
// stay in uniform registers.
struct SplitTiles {
  int num_blocks;   // blocks of k in a tile
  int first_split;  // from this tile on, each tile is split over the two blocks of a cluster
};

// The tiles of the last wave of `blocks` blocks are split if there are no more of them than clusters, and if
// each block gets at least one block of k.
inline SplitTiles split_last_tiles(int tiles, int blocks, int num_blocks) {
  const int whole = tiles / blocks * blocks;
  return {num_blocks, tiles - whole <= blocks / 2 && num_blocks >= 2 ? whole : tiles};
}

// What a block does for a tile: k-blocks first ... first + count - 1.
struct TileWork {
  int row;  // where the tile stands: its number, or its first row and column, as the kernel counts
  int column;
  int first;
  int count;
  bool split;  // whether the other block of the cluster does the rest of K

  // The half of K that block `rank` takes of a tile that is split over a cluster.
  __device__ __forceinline__ void take_half(const SplitTiles& tiles, int rank) {
    const int half = tiles.num_blocks / 2;
    first = rank == 0 ? 0 : half;
    count = rank == 0 ? half : tiles.num_blocks - half;
    split = true;
  }
};

}  // namespace htree::device
