// The top layer laid out for matrix products of warpgroups: tiles of 128 consecutive nodes of one kv head.
//
//   keys    R_p K_p in fp16 times a power of two per node, p = the node
//           (docs/semantics/tree_attention.md §1.4)
//   values  in the input's dtype
//   scales  a float per node that undoes the power of two; a flag per tile: some scale is not 1
//
// A tile is cut into panels of 64 dims: 128 rows of 128 bytes in the 128-byte swizzle, so that one bulk copy
// of a tile is an operand. Heads of 32 dims leave half of every row unused. Rows past the last node are zero.
//
// The power of two is that of the packed parents, 1 for most nodes (packed_parent.cuh); multiplying by scales
// of 1 changes no bit, so a tile whose flag is 0 skips it.
#pragma once

#include <cstdint>

#include "ops/tree_attention/cuda/tree/dense_layer.h"
#include "ops/tree_attention/cuda/tree/packed_parent.cuh"

namespace htree::tree_attention {

constexpr int kPanelDims = 64;
constexpr int kPanelRowBytes = 128;
constexpr int kTopPanelBytes = kDenseTileNodes * kPanelRowBytes;

template <int kDim>
constexpr int kPanels = (kDim + kPanelDims - 1) / kPanelDims;
template <int kDim>
constexpr int kTopTileBytes = kPanels<kDim>* kTopPanelBytes;

// Byte offset of the 16-byte chunk `chunk` (8 dims) of a row in a tile whose panels have `rows` rows.
__host__ __device__ constexpr int panel_offset(int rows, int row, int chunk) {
  return chunk / 8 * rows * kPanelRowBytes + row * kPanelRowBytes + (((chunk ^ row) & 7) << 4);
}

}  // namespace htree::tree_attention
