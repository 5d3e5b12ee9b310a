// How fp8_gemm writes its sums to c [m, n]: through shared memory and by tensor copies, which cut off what
// lies outside of c and leave the warps free for the next tile. In GemmStore a warp has 16 rows of c, in
// GemmSwapAbStore a warpgroup has 64 columns.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "device/mma.cuh"
#include "device/numeric.cuh"
#include "device/shared_memory.cuh"
#include "device/sm90/tma.cuh"
#include "device/sm90/wgmma.cuh"
#include "ops/fp8/gemm/gemm_params.h"

namespace htree::fp8 {

// Of its warp's 16 rows a thread holds element 4 j + 2 h + i, which is row lane / 4 + 8 h, column 8 j +
// 2 (lane % 4) + i. kMostBytes of shared memory belong to the warp; as many boxes are laid out at a
// time as fit. kUnit is a number of columns that a box divides, so that stores of kUnit columns or more
// share one tensor map.
template <typename Out, int kColumns, int kMostBytes, int kUnit = kColumns>
struct GemmStore {
  static constexpr int kRowBytes = kColumns * static_cast<int>(sizeof(Out));
  // A box is 16 rows x kBoxBytes, swizzled by that width.
  static constexpr int kUnitBytes = kUnit * static_cast<int>(sizeof(Out));
  static constexpr int kBoxBytes = kUnitBytes % 128 == 0 ? 128 : kUnitBytes % 64 == 0 ? 64 : 32;
  static constexpr int kBoxRows = 16;
  static constexpr int kBoxColumns = kBoxBytes / static_cast<int>(sizeof(Out));
  static constexpr int kBoxes = kColumns / kBoxColumns;
  static_assert(kBoxes * kBoxColumns == kColumns);
  static constexpr int kStaged = [] {  // boxes laid out at a time
    int count = kBoxes;
    while (count > 1 && (kBoxes % count != 0 || count * 16 * kBoxBytes > kMostBytes)) {
      --count;
    }
    return count;
  }();
  struct alignas(1024) Shared {
    uint8_t boxes[kStaged][16 * kBoxBytes];
  };

  // All lanes of a warp call it; after the last call, finish(). `map`: the boxes of c.
  static __device__ __forceinline__ void rows(Shared& shared, const CUtensorMap* map, int row, int column,
                                              const float (&d)[kColumns / 2]) {
    const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
    for (int first = 0; first < kBoxes; first += kStaged) {
      if (lane == 0) {
        device::wait_stores_read<0>();
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kStaged; ++i) {
        stage(device::shared_address(shared.boxes[i]), (first + i) * kBoxColumns, d);
      }
      device::fence_async_shared();
      __syncwarp();
      if (lane == 0) {
#pragma unroll
        for (int i = 0; i < kStaged; ++i) {
          device::tensor_store_2d(map, shared.boxes[i], column + (first + i) * kBoxColumns, row);
        }
        device::commit_stores();
      }
    }
  }

  // A thread calls it before the shared memory is given up.
  static __device__ __forceinline__ void finish() {
    device::wait_stores<0>();
  }

  // For a c whose rows are not aligned to 16 bytes. All lanes of a warp call it.
  static __device__ __forceinline__ void pairs(Out* c, const GemmSizes& sizes, int64_t row, int64_t column,
                                               const float (&d)[kColumns / 2]) {
    const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int64_t r = row + lane / 4 + 8 * h;
      if (r >= sizes.m) {
        continue;
      }
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
        const int64_t at = column + 8 * j + 2 * (lane % 4);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (at + i < sizes.n) {
            c[r * sizes.n + at + i] = device::from_acc<Out>(d[4 * j + 2 * h + i]);
          }
        }
      }
    }
  }

 private:
  // Where a pack of 16 bytes stands in a box.
  static __device__ __forceinline__ uint32_t place(uint32_t box, int row, int pack) {
    const int swizzled = pack ^ row / (128 / kBoxBytes) % (kBoxBytes / 16);
    return box + static_cast<uint32_t>(row * kBoxBytes + swizzled * 16);
  }

  // Lays out the columns from `first` on in one box.
  static __device__ __forceinline__ void stage(uint32_t box, int first, const float (&d)[kColumns / 2]) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    if constexpr (sizeof(Out) == 2) {
#pragma unroll
      for (int pack = 0; pack < kBoxBytes / 16; pack += 2) {
        uint32_t packed[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // pack + i / 2, rows number i % 2
          const int at = (first / 8 + pack + i / 2) * 4 + i % 2 * 2;
          packed[i] = device::pack_pair<Out>(d[at], d[at + 1]);
        }
        // Lane i gives the address of row i % 16, pack i / 16 of the two.
        device::store_matrices(place(box, lane % 16, pack + lane / 16), packed);
      }
    } else {
#pragma unroll
      for (int j = 0; j < kBoxColumns / 8; ++j) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int at = (first / 8 + j) * 4 + 2 * h;
          device::store_shared_8(place(box, lane / 4 + 8 * h, 2 * j + lane % 4 / 2) + lane % 2 * 8, d[at],
                                 d[at + 1]);
        }
      }
    }
  }
};

// The same with swap AB. Element 4 j + 2 h + i of thread t of a warpgroup is column 16 (t / 32) + t %
// 32 / 4 + 8 h, row 8 j + 2 (t % 4) + i, of 64 columns and kRows rows of c. All threads of the warpgroup
// call. kMostBytes of shared memory belong to the warpgroup.
template <typename Out, int kRows, int kMostBytes>
struct GemmSwapAbStore {
  static constexpr int kBoxBytes = 128;
  static constexpr int kBoxRows = kRows;
  static constexpr int kBoxColumns = kBoxBytes / static_cast<int>(sizeof(Out));
  static constexpr int kBoxes = 64 / kBoxColumns;
  static constexpr int kWarpsPerBox = kBoxColumns / 16;
  static constexpr int kStaged = kBoxes * kRows * kBoxBytes <= kMostBytes ? kBoxes : 1;  // boxes at a time
  static_assert(kStaged * kRows * kBoxBytes <= kMostBytes && kRows % 8 == 0);
  struct alignas(1024) Shared {
    uint8_t boxes[kStaged][kRows * kBoxBytes];
  };

  // `barrier`: a named barrier of the warpgroup. After the last call, finish().
  static __device__ __forceinline__ void tile(Shared& shared, const CUtensorMap* map, int row, int column,
                                              int barrier, const float (&d)[kRows / 2]) {
    const int thread = static_cast<int>(threadIdx.x % 128);
#pragma unroll
    for (int first = 0; first < kBoxes; first += kStaged) {
      if (thread == 0) {
        device::wait_stores_read<0>();
      }
      device::named_barrier_sync(barrier, 128);
      const int box = thread / 32 / kWarpsPerBox - first;
      if (kStaged == kBoxes || box == 0) {
        stage(device::shared_address(shared.boxes[box]), d);
      }
      device::fence_async_shared();
      device::named_barrier_sync(barrier, 128);
      if (thread == 0) {
#pragma unroll
        for (int i = 0; i < kStaged; ++i) {
          device::tensor_store_2d(map, shared.boxes[i], column + (first + i) * kBoxColumns, row);
        }
        device::commit_stores();
      }
    }
  }

  // A thread calls it before the shared memory is given up.
  static __device__ __forceinline__ void finish() {
    device::wait_stores<0>();
  }

  // For a c whose rows are not aligned to 16 bytes. `c` is [num_rows, num_columns].
  static __device__ __forceinline__ void elements(Out* c, int64_t num_rows, int64_t num_columns, int64_t row,
                                                  int64_t column, const float (&d)[kRows / 2]) {
    const int thread = static_cast<int>(threadIdx.x % 128);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int64_t at = column + thread / 32 * 16 + thread % 32 / 4 + 8 * h;
      if (at >= num_columns) {
        continue;
      }
#pragma unroll
      for (int j = 0; j < kRows / 8; ++j) {
        const int64_t r = row + 8 * j + 2 * (thread % 4);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (r + i < num_rows) {
            c[(r + i) * num_columns + at] = device::from_acc<Out>(d[4 * j + 2 * h + i]);
          }
        }
      }
    }
  }

 private:
  // Lays out the warp's 16 columns in its box.
  static __device__ __forceinline__ void stage(uint32_t box, const float (&d)[kRows / 2]) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int first = static_cast<int>(threadIdx.x / 32) % kWarpsPerBox * 16;  // column in the box
    if constexpr (sizeof(Out) == 2) {
#pragma unroll
      for (int j = 0; j < kRows / 8; j += 2) {
        // Eight rows and their second eight columns, twice; where the number of eights is odd, the
        // last one is repeated.
        const int next = j + 1 < kRows / 8 ? j + 1 : j;
        const uint32_t packed[4] = {device::pack_pair<Out>(d[4 * j], d[4 * j + 1]),
                                    device::pack_pair<Out>(d[4 * j + 2], d[4 * j + 3]),
                                    device::pack_pair<Out>(d[4 * next], d[4 * next + 1]),
                                    device::pack_pair<Out>(d[4 * next + 2], d[4 * next + 3])};
        // Lane i gives the address of row i % 8 of the first or the second eight rows, columns number i
        // / 8 % 2.
        const int pack = (first / 8 + lane / 8 % 2) ^ (lane % 8);
        device::store_matrices_transposed(
            box + static_cast<uint32_t>(((lane < 16 ? j : next) * 8 + lane % 8) * kBoxBytes + pack * 16),
            packed);
      }
    } else {
#pragma unroll
      for (int at = 0; at < kRows / 2; ++at) {
        const int r = at / 4 * 8 + 2 * (lane % 4) + at % 2;
        const int c = first + lane / 4 + at / 2 % 2 * 8;
        device::store_shared_4(
            box + static_cast<uint32_t>(r * kBoxBytes + ((c / 4) ^ (r % 8)) * 16 + c % 4 * 4), d[at]);
      }
    }
  }
};

}  // namespace htree::fp8
