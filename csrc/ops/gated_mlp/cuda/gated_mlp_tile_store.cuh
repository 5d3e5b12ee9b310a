// How a warp stores its 16 rows of a tile: it rounds them, lays them out in shared memory and
// copies them from there.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "device/hopper/tma.cuh"
#include "device/mma.cuh"
#include "device/shared_memory.cuh"

namespace htree::gated_mlp {

inline constexpr int kStoreRows = 16;
inline constexpr int kStoreColumns = 64;  // 128 bytes: the width of the store's swizzle

// 16 rows of 64 columns, swizzled; aligned to 1024 bytes.
using StagedRows = uint8_t[kStoreRows * 128];

// A result [rows, columns]. It is copied by boxes of 64 columns x 16 rows, cut off at its edges, or, where
// its rows are not aligned to 16 bytes, written element by element.
template <typename T>
struct Destination {
  const CUtensorMap* map;
  T* unaligned;  // contiguous, or null
  int64_t rows;
  int64_t columns;
};

// A warp stores value(i) for its accumulators i in [0, kColumns / 2), to rows from `row` and columns from
// `column` on, by way of staged[kColumns / 64].
template <typename T, int kColumns, class Value>
__device__ __forceinline__ void store_tile(StagedRows* staged, const Destination<T>& to, int row, int column,
                                           Value&& value) {
  constexpr int kParts = kColumns / kStoreColumns;
  static_assert(kColumns % kStoreColumns == 0);
  const int lane = static_cast<int>(threadIdx.x % 32);
  if (lane == 0) {
    device::wait_stores_read<0>();
  }
  __syncwarp();
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {  // a pair is 16 columns
      uint32_t packed[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // 8 columns number i / 2, rows number i % 2
        const int at = part * 32 + pair * 8 + (i / 2) * 4 + (i % 2) * 2;
        packed[i] = device::pack_pair<T>(value(at), value(at + 1));
      }
      // Lane i gives the address of row i % 16, 8-column chunk 2 * pair + i / 16.
      const int chunk = (2 * pair + lane / 16) ^ (lane % 8);
      device::store_matrices(device::shared_address(staged[part]) + (lane % 16) * 128 + chunk * 16, packed);
    }
  }
  if (to.unaligned != nullptr) {
    __syncwarp();
    for (int i = lane; i < kStoreRows * kColumns; i += 32) {
      const int r = i / kColumns;
      const int c = i % kColumns;
      if (row + r < to.rows && column + c < to.columns) {
        const uint8_t* from = staged[c / 64] + r * 128 + (((c % 64 / 8) ^ (r % 8)) * 8 + c % 8) * 2;
        to.unaligned[(row + r) * to.columns + column + c] = *reinterpret_cast<const T*>(from);
      }
    }
    return;
  }
  device::fence_async_shared();
  __syncwarp();
  if (lane == 0) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      device::tensor_store_2d(to.map, staged[part], column + part * kStoreColumns, row);
    }
    device::commit_stores();
  }
}

}  // namespace htree::gated_mlp
