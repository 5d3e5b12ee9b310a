// c = (a b^T) / (s_a s_b) for many rows: persistent blocks, one warpgroup that loads and two that multiply. A
// tile is kRows rows of a against kColumns rows of b.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "device/mma.cuh"
#include "device/numeric.cuh"
#include "device/stmatrix.cuh"
#include "device/tile_order.cuh"
#include "ops/fp8/gemm/gemm_multiply.cuh"

namespace htree::fp8 {

template <typename Out_, int kRows_, int kColumns_, int kStages_, int kPromoteK_>
struct GemmTileTraits {
  using Out = Out_;
  static constexpr int kRows = kRows_;
  static constexpr int kColumns = kColumns_;
  static constexpr int kPromoteK = kPromoteK_;
  static constexpr int kHalves = kRows / 128;  // 64-row parts of a warpgroup
  using Shape = device::GemmShape<__nv_fp8_e4m3, kRows, kColumns, kStages_, 1, 2>;
  static constexpr int kThreads = 128 * (1 + Shape::kWarpgroups);
  static constexpr int kLoaderRegisters = 40;
  static constexpr int kMultiplierRegisters = 232;
  static_assert(kLoaderRegisters + Shape::kWarpgroups * kMultiplierRegisters <= 504);
  static constexpr int kStoreColumns = 64;  // 128 bytes of a half type: the width of the store's swizzle

  struct Shared {
    device::GemmRing<Shape> ring;
    // Per warp and 64 columns: 16 rows of 128 bytes, swizzled.
    alignas(1024) uint8_t out[Shape::kWarpgroups * 4][kColumns / kStoreColumns][16 * 128];
  };
  static constexpr int kSharedBytes = sizeof(Shared) + 1024;  // room to align the base
};

// Tensor copies of a [m, k] and b [n, k] by boxes of 128 bytes x kRows or kColumns rows, and of c [m, n] by
// 64 columns x 16 rows where its rows are aligned.
struct GemmTileMaps {
  CUtensorMap a;
  CUtensorMap b;
  CUtensorMap c;
};

template <typename Out>
struct GemmTileArguments {
  GemmSizes sizes;
  GemmScale a_scale;
  GemmScale b_scale;
  Out* direct;  // c, where its elements are stored one by one: fp32, or rows not aligned to 16 bytes; else
                // null
  int num_blocks;
};

// Writes value(i, j) of two neighbouring columns per place to c. The thread's places are rows lane / 4 (+ 8)
// from `row` on, columns 8 j + 2 (lane % 4) from `column` on.
template <class Tr, class Value>
__device__ __forceinline__ void store_direct(const GemmTileArguments<typename Tr::Out>& p, int64_t row,
                                             int64_t column, Value&& value) {
  const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int64_t r = row + lane / 4 + 8 * h;
    if (r >= p.sizes.m) {
      continue;
    }
#pragma unroll
    for (int j = 0; j < Tr::kColumns / 8; ++j) {
      const int64_t c = column + 8 * j + 2 * (lane % 4);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (c + i < p.sizes.n) {
          p.direct[r * p.sizes.n + c + i] = device::from_acc<typename Tr::Out>(value(4 * j + 2 * h + i));
        }
      }
    }
  }
}

template <class Tr, class Value>
__device__ __forceinline__ void store_staged(typename Tr::Shared& shared, const CUtensorMap* map, int row,
                                             int column, Value&& value) {
  const int warp = static_cast<int>(threadIdx.x / 32) - 4;
  const int lane = static_cast<int>(threadIdx.x % 32);
  if (lane == 0) {
    device::wait_stores_read<0>();
  }
  __syncwarp();
#pragma unroll
  for (int part = 0; part < Tr::kColumns / Tr::kStoreColumns; ++part) {
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {  // 16 columns
      uint32_t packed[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // 8 columns i / 2, row half i % 2
        const int at = part * 32 + pair * 8 + (i / 2) * 4 + (i % 2) * 2;
        packed[i] = device::pack_pair<typename Tr::Out>(value(at), value(at + 1));
      }
      // Lane i gives the address of row i % 16, 8-column chunk 2 * pair + i / 16.
      const int chunk = (2 * pair + lane / 16) ^ (lane % 8);
      device::store_matrices(device::shared_address(shared.out[warp][part]) + (lane % 16) * 128 + chunk * 16,
                             packed);
    }
  }
  device::fence_async_shared();
  __syncwarp();
  if (lane == 0) {
#pragma unroll
    for (int part = 0; part < Tr::kColumns / Tr::kStoreColumns; ++part) {
      device::tensor_store_2d(map, shared.out[warp][part], column + part * Tr::kStoreColumns, row);
    }
    device::commit_stores();
  }
}

// A warp scales and writes its 16 rows from `row` on.
template <class Tr>
__device__ __forceinline__ void store_rows(typename Tr::Shared& shared, const CUtensorMap* map,
                                           const GemmTileArguments<typename Tr::Out>& p, int row, int column,
                                           float (&d)[Tr::kColumns / 2]) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const float by_row[2] = {inverse_scale(p.a_scale, row + lane / 4, p.sizes.m),
                           inverse_scale(p.a_scale, row + lane / 4 + 8, p.sizes.m)};
#pragma unroll
  for (int j = 0; j < Tr::kColumns / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float by_column = inverse_scale(p.b_scale, column + 8 * j + 2 * (lane % 4) + i, p.sizes.n);
      d[4 * j + i] = rescale(d[4 * j + i], by_row[0], by_column);
      d[4 * j + 2 + i] = rescale(d[4 * j + 2 + i], by_row[1], by_column);
    }
  }
  const auto value = [&](int i) { return d[i]; };
  if constexpr (sizeof(typename Tr::Out) == 2) {
    if (p.direct == nullptr) {
      store_staged<Tr>(shared, map, row, column, value);
      return;
    }
  }
  store_direct<Tr>(p, row, column, value);
}

template <class Tr>
__global__ void __launch_bounds__(Tr::kThreads, 1)
    gemm_tile_kernel(const __grid_constant__ GemmTileMaps maps, const device::TileOrder order,
                     const GemmTileArguments<typename Tr::Out> p) {
#if HTREE_SM90A
  using Shape = typename Tr::Shape;
  extern __shared__ uint8_t raw[];
  auto& shared = *reinterpret_cast<typename Tr::Shared*>((reinterpret_cast<uintptr_t>(raw) + 1023) &
                                                         ~static_cast<uintptr_t>(1023));
  if (threadIdx.x == 0) {
    device::init_ring(shared.ring);
    device::fence_barrier_init();
  }
  __syncthreads();

  const int warpgroup = static_cast<int>(threadIdx.x / 128) - 1;
  device::RingPlace<Shape::kStages> place;
  if (warpgroup < 0) {
    device::lower_registers<Tr::kLoaderRegisters>();
    if (threadIdx.x != 0) {
      return;
    }
    for (int tile = blockIdx.x; tile < order.count(); tile += gridDim.x) {
      int row_tile, column_tile;
      order.place(tile, row_tile, column_tile);
      device::fill_ring<Shape>(shared.ring, place, p.num_blocks,
                               [&](uint8_t* a, uint8_t* b, int block_idx, device::Barrier* full) {
                                 const int k = block_idx * Shape::kBlockK;
                                 device::tensor_load_2d(a, &maps.a, k, row_tile * Tr::kRows, full);
                                 device::tensor_load_2d(b, &maps.b, k, column_tile * Tr::kColumns, full);
                               });
    }
    return;
  }

  device::raise_registers<Tr::kMultiplierRegisters>();
  const int warp_in_group = static_cast<int>(threadIdx.x / 32 % 4);
  for (int tile = blockIdx.x; tile < order.count(); tile += gridDim.x) {
    int row_tile, column_tile;
    order.place(tile, row_tile, column_tile);
    float sum[Tr::kHalves][Tr::kColumns / 2];
    multiply_promoted<Shape, Tr::kPromoteK, Tr::kHalves>(shared.ring, place, p.num_blocks, warpgroup, sum);
#pragma unroll
    for (int half = 0; half < Tr::kHalves; ++half) {
      const int row = row_tile * Tr::kRows + (warpgroup * Tr::kHalves + half) * 64 + warp_in_group * 16;
      store_rows<Tr>(shared, &maps.c, p, row, column_tile * Tr::kColumns, sum[half]);
    }
  }
  if (threadIdx.x % 32 == 0) {
    device::wait_stores<0>();
  }
#else
  __trap();  // the launcher does not come here: see gemm_is_compiled_for_hopper()
#endif
}

}  // namespace htree::fp8
