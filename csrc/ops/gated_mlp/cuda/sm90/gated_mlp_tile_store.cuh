// How a warp stores its part of a tile: it rounds it, lays it out in shared memory and copies it from there, or, where
// the ring leaves no space or columns are no multiple of 64, stores it from registers.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "device/mma.cuh"
#include "device/shared_memory.cuh"
#include "device/sm90/tma.cuh"

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

// ---- from registers: four lanes hold four neighbours each, a sector of 32 bytes

// A row of 16 columns, of which lane q of four holds the pairs q of the left and of the right eight. Returns the four
// columns from neighbour_column() on.
__device__ __forceinline__ uint2 neighbours(uint32_t left, uint32_t right) {
  const bool odd = threadIdx.x % 2 != 0;
  const uint32_t other = __shfl_xor_sync(0xffffffff, odd ? left : right, 1);
  return odd ? make_uint2(other, right) : make_uint2(left, other);
}
__device__ __forceinline__ int neighbour_column() {
  return static_cast<int>(threadIdx.x % 2 * 8 + threadIdx.x % 4 / 2 * 4);
}

// Stores those of four neighbours, from `to` on, that are among the `columns` columns from there to the end of the row.
// `aligned`: rows begin at multiples of 8 bytes.
template <typename T>
__device__ __forceinline__ void store_neighbours(T* to, int64_t columns, bool aligned, const uint2& pack) {
  if (aligned && columns >= 4) {
    *reinterpret_cast<uint2*>(to) = pack;
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < columns) {
        to[i] = reinterpret_cast<const T*>(&pack)[i];
      }
    }
  }
}

// A warp stores value(i) for its accumulators i in [0, kColumns / 2) as store_tile() does; `to` is the result.
template <typename T, int kColumns, class Value>
__device__ __forceinline__ void store_tile_from_registers(T* to, int64_t rows, int64_t columns, int64_t row,
                                                          int64_t column, Value&& value) {
  static_assert(kColumns % 8 == 0);
  row += threadIdx.x % 32 / 4;
  column += neighbour_column();
  const bool aligned = columns % 4 == 0;
#pragma unroll
  for (int lower = 0; lower < 2; ++lower) {  // the 8 rows that an accumulator belongs to
    const bool exists = row + lower * 8 < rows;
    T* first = to + (row + lower * 8) * columns + column;
#pragma unroll
    for (int j = 0; j < kColumns; j += 16) {
      const auto pair = [&](int from) {
        return device::pack_pair<T>(value(from / 2 + lower * 2), value(from / 2 + lower * 2 + 1));
      };
      const bool has_right = j + 8 < kColumns;
      const uint2 pack = neighbours(pair(j), has_right ? pair(j + 8) : 0);
      if (exists && (has_right || threadIdx.x % 2 == 0)) {
        store_neighbours(first + j, columns - column - j, aligned, pack);
      }
    }
  }
}

}  // namespace htree::gated_mlp
