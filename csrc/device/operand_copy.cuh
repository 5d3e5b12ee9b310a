// Copies of k-blocks of the rows of an operand that exist, for the rings of device/gemm_pipeline.cuh.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "device/gemm_pipeline.cuh"

namespace htree::device {

// Tensor copies of the rows of an operand, 128 bytes wide: `whole` brings a tile's rows or a block's share of
// them, `rest` those of the last tile that exist, because copies fill what lies outside with zeros at a
// fraction of their speed.
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
  int offset;      // in the stage, bytes
  uint32_t bytes;  // that arrive per k-block, whoever copies them
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

  // `policy`: none, or one of the L2 cache.
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

}  // namespace htree::device
