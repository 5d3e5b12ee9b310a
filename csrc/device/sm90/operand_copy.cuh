// Copies of k-blocks of an operand into the rings of device/sm90/gemm_pipeline.cuh, without the rows that
// do not exist.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "device/sm90/gemm_pipeline.cuh"

namespace htree::device {

// Descriptors for the rows of an operand, 128 bytes wide. `whole` copies the rows of a tile, or a block's
// share of them. `rest` copies the rows of the last tile that exist: what lies outside a tensor is filled
// with zeros, at a fraction of the speed of copies.
struct OperandMaps {
  CUtensorMap whole;
  CUtensorMap rest;
};

// What a block copies of one operand of a tile: nothing, its own rows, or its share of the rows of all blocks
// of the cluster.
template <int kRows, int kSharing>
struct OperandCopy {
  const CUtensorMap* map;
  int row;
  int offset;      // in the stage, in bytes
  uint32_t bytes;  // bytes that arrive per k-block, whoever copies them
  bool copies;

  __device__ __forceinline__ OperandCopy(const OperandMaps& maps, int64_t first, int64_t count) {
    const int present = static_cast<int>(min(max(count - first, int64_t{0}), int64_t{kRows}));
    const int rank = kSharing > 1 ? static_cast<int>(cluster_block_rank()) : 0;
    const bool whole = present == kRows;
    map = whole ? &maps.whole : &maps.rest;
    bytes = static_cast<uint32_t>(present * kBlockBytes);
    const int share = whole ? rank * (kRows / kSharing) : 0;
    row = static_cast<int>(first) + share;
    offset = share * kBlockBytes;
    copies = present > 0 && (whole || rank == 0);
  }

  // `policy`: none, or a cache policy of device/sm90/tma.cuh.
  template <typename... Policy>
  __device__ __forceinline__ void start(uint8_t* stage, int k, Barrier* full, Policy... policy) const {
    if (copies) {
      if constexpr (kSharing > 1) {
        tensor_load_2d_multicast(stage + offset, map, k, row, full, (1 << kSharing) - 1);
      } else {
        tensor_load_2d(stage, map, k, row, full, policy...);
      }
    }
  }
};

// Copies k-blocks of an MN-major operand of two-byte elements, [k, count] in memory, in boxes of 64 k x 64
// columns. Of a tile's kColumns columns from `first` on it copies the boxes that have a column.
template <int kColumns>
struct ColumnCopy {
  static constexpr int kBoxColumns = 64;
  static constexpr int kBoxBytes = kBoxColumns * kBlockBytes;
  static_assert(kColumns % kBoxColumns == 0);
  int first;
  int num_boxes;
  uint32_t bytes;  // bytes that arrive per k-block, whoever copies them

  __device__ __forceinline__ ColumnCopy(int first_column, int64_t count) : first(first_column) {
    const int64_t present = min(max(count - first, int64_t{0}), int64_t{kColumns});
    num_boxes = static_cast<int>((present + kBoxColumns - 1) / kBoxColumns);
    bytes = static_cast<uint32_t>(num_boxes * kBoxBytes);
  }

  __device__ __forceinline__ void start(uint8_t* stage, const CUtensorMap* map, int k, Barrier* full) const {
#pragma unroll
    for (int box = 0; box < kColumns / kBoxColumns; ++box) {
      if (box < num_boxes) {
        tensor_load_2d(stage + box * kBoxBytes, map, first + box * kBoxColumns, k, full);
      }
    }
  }

  // In a cluster of two, block `rank` copies every other box, to both blocks.
  __device__ __forceinline__ void start_share(uint8_t* stage, const CUtensorMap* map, int k, int rank,
                                              Barrier* full) const {
#pragma unroll
    for (int i = 0; i < kColumns / kBoxColumns; i += 2) {
      const int box = i + rank;
      if (box < num_boxes) {
        tensor_load_2d_multicast(stage + box * kBoxBytes, map, first + box * kBoxColumns, k, full, 3);
      }
    }
  }
};

}  // namespace htree::device
