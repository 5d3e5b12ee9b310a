// The order in which persistent blocks take the tiles of a matrix product.
#pragma once

namespace htree::device {

// Tile number to place: groups of `group` row tiles are swept across all columns, rows first, so that the
// blocks at work at one time share rows of both operands in L2.
struct TileOrder {
  int num_row_tiles;
  int num_column_tiles;
  int group;

  __host__ __device__ int count() const { return num_row_tiles * num_column_tiles; }
  __device__ __forceinline__ void place(int tile, int& row_tile, int& column_tile) const {
    const int per_group = group * num_column_tiles;
    const int first = tile / per_group * group;
    const int in_group = tile % per_group;
    const int rows = min(group, num_row_tiles - first);
    row_tile = first + in_group % rows;
    column_tile = in_group / rows;
  }
};

}  // namespace htree::device
