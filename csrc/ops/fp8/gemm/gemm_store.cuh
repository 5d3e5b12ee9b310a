// How a warp of fp8_gemm writes 16 rows of its sums, kColumns wide, to c [m, n].
#pragma once

#include <cstdint>

#include "device/mma.cuh"
#include "device/numeric.cuh"
#include "device/shared_address.cuh"
#include "device/stmatrix.cuh"
#include "ops/fp8/gemm/gemm_params.h"

namespace htree::fp8 {

// A thread holds of its warp's 16 rows: element 4 j + 2 h + i is row lane / 4 + 8 h, column
// 8 j + 2 (lane % 4) + i.
template <typename Out, int kColumns>
struct GemmStore {
  static constexpr bool kStaged = sizeof(Out) == 2;
  static constexpr int kChunks = kColumns / 8;                   // packs of 16 bytes in a row
  static constexpr int kPartChunks = kChunks < 8 ? kChunks : 8;  // that are staged at a time
  static constexpr int kPitch = kPartChunks | 1;  // odd: eight rows of a chunk lie in all banks
  static_assert(kPartChunks % 2 == 0 && kChunks % kPartChunks == 0);
  struct Shared {
    alignas(16) uint4 rows[kStaged ? 16 * kPitch : 1];
  };

  // All lanes of a warp; rows from `row` and columns from `column` on that lie outside of c are left out.
  static __device__ __forceinline__ void rows(Shared& shared, Out* c, const GemmSizes& sizes, int64_t row,
                                              int64_t column, const float (&d)[kColumns / 2]) {
    if constexpr (kStaged) {
      if (sizes.n % 8 == 0) {
#pragma unroll
        for (int first = 0; first < kChunks; first += kPartChunks) {
          __syncwarp();  // the last part has been read
          stage(shared, first, d);
          __syncwarp();
          copy_packs(shared, c, sizes, row, column + 8 * first);
        }
        return;
      }
    }
    store_pairs(c, sizes, row, column, d);
  }

 private:
  static __device__ __forceinline__ void stage(Shared& shared, int first, const float (&d)[kColumns / 2]) {
    const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
    for (int chunk = 0; chunk < kPartChunks; chunk += 2) {
      uint32_t packed[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // chunk + i / 2, row half i % 2
        const int at = (first + chunk + i / 2) * 4 + i % 2 * 2;
        packed[i] = device::pack_pair<Out>(d[at], d[at + 1]);
      }
      // Lane i gives the address of row i % 16, chunk i / 16 of the two.
      device::store_matrices(device::shared_address(&shared.rows[lane % 16 * kPitch + chunk + lane / 16]),
                             packed);
    }
  }

  static __device__ __forceinline__ void copy_packs(const Shared& shared, Out* c, const GemmSizes& sizes,
                                                    int64_t row, int64_t column) {
    const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
    for (int i = lane; i < 16 * kPartChunks; i += 32) {
      const int r = i / kPartChunks;
      const int chunk = i % kPartChunks;
      if (row + r < sizes.m && column + 8 * chunk < sizes.n) {
        *reinterpret_cast<uint4*>(c + (row + r) * sizes.n + column + 8 * chunk) =
            shared.rows[r * kPitch + chunk];
      }
    }
  }

  static __device__ __forceinline__ void store_pairs(Out* c, const GemmSizes& sizes, int64_t row,
                                                     int64_t column, const float (&d)[kColumns / 2]) {
    const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int64_t r = row + lane / 4 + 8 * h;
      if (r >= sizes.m) {
        continue;
      }
#pragma unroll
      for (int j = 0; j < kChunks; ++j) {
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
};

}  // namespace htree::fp8
