// c = (a b) / (s_a s_b) for e4m3 operands: persistent blocks, one warpgroup that loads and two that multiply.
// A tile is 128 rows of a against kColumns columns of b (stored as rows, K-major).
//
// The tensor cores of sm_90 keep fewer bits than fp32 while they add e4m3 products, so partial sums of
// kPromoteK elements are added to fp32 registers.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "device/gemm_pipeline.cuh"
#include "device/mma.cuh"
#include "device/stmatrix.cuh"

namespace htree::fp8 {

struct GemmScales {
  const float* a;  // [1] or [m]
  const float* b;  // [1] or [n]
  int a_stride;    // 0 for one scale of the whole operand, 1 for one per row or column
  int b_stride;
};

struct GemmMaps {
  CUtensorMap a;
  CUtensorMap b;
  CUtensorMap c;
};

struct GemmOrder {
  int num_row_tiles;  // of clusters
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

template <typename Out_, int kRows_, int kColumns_, int kStages_, int kCluster_, int kPromoteK_>
struct GemmTraits {
  using T = __nv_fp8_e4m3;
  using Out = Out_;
  static constexpr int kRows = kRows_;
  static constexpr int kHalves = kRows / 128;  // 64-row parts of a warpgroup
  static constexpr int kColumns = kColumns_;
  static constexpr int kCluster = kCluster_;
  static constexpr int kPromoteK = kPromoteK_;  // 32, 64, 128; 0: never
  using Shape = device::GemmShape<T, kRows, kColumns, kStages_, kCluster, 2>;
  static constexpr int kThreads = 128 * (1 + Shape::kWarpgroups);
  static constexpr int kLoaderRegisters = 40;
  static constexpr int kMultiplierRegisters = 232;
  static constexpr int kStoreColumns = 64;
  struct Shared {
    device::GemmRing<Shape> ring;
    alignas(1024) uint8_t out[Shape::kWarpgroups * 4][kColumns / kStoreColumns][16 * 128];
  };
  static constexpr int kSharedBytes = sizeof(Shared) + 1024;
};

template <class Shape, int kPromoteK, int kHalves>
__device__ __forceinline__ void multiply_promoted(device::GemmRing<Shape>& ring,
                                                  device::RingPlace<Shape::kStages>& place, int num_blocks,
                                                  int warpgroup, float (&sum)[kHalves][Shape::kRowsB / 2]) {
  constexpr int kSteps = kPromoteK / 32;
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
#pragma unroll
    for (int i = 0; i < Shape::kRowsB / 2; ++i) {
      sum[half][i] = 0.0f;
    }
  }
  for (int block_idx = 0; block_idx < num_blocks; ++block_idx) {
    device::barrier_wait(&ring.full[place.stage], place.parity);
    const uint64_t b = device::k_major_descriptor<device::Swizzle::k128>(ring.b[place.stage]);
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      const uint64_t a = device::k_major_descriptor<device::Swizzle::k128>(
          ring.a[place.stage] + (warpgroup * kHalves + half) * 64 * device::kBlockBytes);
      float d[Shape::kRowsB / 2];
#pragma unroll
      for (int k = 0; k < 4; k += kSteps) {
        device::pin_registers(d);
        device::wgmma_fence();
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          device::wgmma<typename Shape::T, Shape::kRowsB>(d, device::advance(a, (k + step) * 32),
                                                          device::advance(b, (k + step) * 32), step > 0);
        }
        device::wgmma_commit();
        device::pin_registers(d);
        device::wgmma_wait<0>();
        if (half + 1 == kHalves && k + kSteps == 4) {
          device::release_stage(ring, place.stage);
        }
#pragma unroll
        for (int i = 0; i < Shape::kRowsB / 2; ++i) {
          sum[half][i] += d[i];
        }
      }
    }
    place.advance();
  }
}

template <class Tr>
__global__ void __launch_bounds__(Tr::kThreads, 1)
    gemm_kernel(const __grid_constant__ GemmMaps maps, const GemmScales scales, const GemmOrder order,
                const int num_rows, const int num_columns, const int num_blocks) {
#if HTREE_SM90A
  using Shape = typename Tr::Shape;
  using namespace device;
  extern __shared__ uint8_t raw[];
  auto& shared = *reinterpret_cast<typename Tr::Shared*>((reinterpret_cast<uintptr_t>(raw) + 1023) &
                                                         ~static_cast<uintptr_t>(1023));
  if (threadIdx.x == 0) {
    init_ring(shared.ring);
    fence_barrier_init();
  }
  if constexpr (Tr::kCluster > 1) {
    cluster_sync();
  } else {
    __syncthreads();
  }
  const int rank = Tr::kCluster > 1 ? static_cast<int>(cluster_block_rank()) : 0;
  const int warpgroup = static_cast<int>(threadIdx.x / 128) - 1;
  RingPlace<Shape::kStages> place;
  if (warpgroup < 0) {
    lower_registers<Tr::kLoaderRegisters>();
    if (threadIdx.x == 0) {
      for (int tile = blockIdx.x / Tr::kCluster; tile < order.count(); tile += gridDim.x / Tr::kCluster) {
        int row_tile, column_tile;
        order.place(tile, row_tile, column_tile);
        const int row = (row_tile * Tr::kCluster + rank) * Tr::kRows;
        const int column = column_tile * Tr::kColumns;
        fill_ring<Shape>(shared.ring, place, num_blocks,
                         [&](uint8_t* a, uint8_t* b, int block_idx, Barrier* full) {
                           const int k = block_idx * Shape::kBlockK;
                           tensor_load_2d(a, &maps.a, k, row, full);
                           if constexpr (Tr::kCluster == 2) {
                             constexpr int kHalf = Tr::kColumns / 2;
                             tensor_load_2d_multicast(b + rank * kHalf * kBlockBytes, &maps.b, k,
                                                      column + rank * kHalf, full, 3);
                           } else {
                             tensor_load_2d(b, &maps.b, k, column, full);
                           }
                         });
      }
    }
    __syncwarp();
  } else {
    raise_registers<Tr::kMultiplierRegisters>();
    const int warp = static_cast<int>(threadIdx.x / 32) - 4;
    const int lane = static_cast<int>(threadIdx.x % 32);
    for (int tile = blockIdx.x / Tr::kCluster; tile < order.count(); tile += gridDim.x / Tr::kCluster) {
      int row_tile, column_tile;
      order.place(tile, row_tile, column_tile);
      float d[Tr::kHalves][Tr::kColumns / 2];
      if constexpr (Tr::kPromoteK > 0) {
        multiply_promoted<Shape, Tr::kPromoteK, Tr::kHalves>(shared.ring, place, num_blocks, warpgroup, d);
      } else {
        multiply_ring<Shape>(shared.ring, place, num_blocks, warpgroup, d[0]);
      }
      const int column = column_tile * Tr::kColumns;
#pragma unroll
      for (int half = 0; half < Tr::kHalves; ++half) {
        const int row = (row_tile * Tr::kCluster + rank) * Tr::kRows + (warpgroup * Tr::kHalves + half) * 64 +
                        warp % 4 * 16;
        float row_scale[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int at = min(row + lane / 4 + 8 * h, num_rows - 1);
          row_scale[h] = 1.0f / scales.a[at * scales.a_stride];
        }
        if (lane == 0) {
          wait_stores_read<0>();
        }
        __syncwarp();
#pragma unroll
        for (int part = 0; part < Tr::kColumns / 64; ++part) {
#pragma unroll
          for (int pair = 0; pair < 4; ++pair) {
            uint32_t packed[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const int at = part * 32 + pair * 8 + (i / 2) * 4 + (i % 2) * 2;
              const int c = column + part * 64 + pair * 16 + (i / 2) * 8 + 2 * (lane % 4);
              const float s0 = 1.0f / scales.b[min(c, num_columns - 1) * scales.b_stride];
              const float s1 = 1.0f / scales.b[min(c + 1, num_columns - 1) * scales.b_stride];
              packed[i] = pack_pair<typename Tr::Out>(d[half][at] * row_scale[i % 2] * s0,
                                                      d[half][at + 1] * row_scale[i % 2] * s1);
            }
            const int chunk = (2 * pair + lane / 16) ^ (lane % 8);
            store_matrices(shared_address(shared.out[warp][part]) + (lane % 16) * 128 + chunk * 16, packed);
          }
        }
        fence_async_shared();
        __syncwarp();
        if (lane == 0) {
#pragma unroll
          for (int part = 0; part < Tr::kColumns / 64; ++part) {
            tensor_store_2d(&maps.c, shared.out[warp][part], column + part * 64, row);
          }
          commit_stores();
        }
      }
    }
    if (lane == 0) {
      wait_stores<0>();
    }
    __syncwarp();
  }
  if constexpr (Tr::kCluster > 1) {
    cluster_sync();
  }
#endif
}

}  // namespace htree::fp8
