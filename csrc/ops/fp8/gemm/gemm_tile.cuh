// c = (a b^T) / (s_a s_b) for many rows: persistent blocks, one warpgroup that loads and two that multiply. A
// tile is kRows rows of a against kColumns rows of b. In a cluster of two, the blocks take neighbouring
// columns of one row tile, and each loads half of its rows of a for both.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "device/mma.cuh"
#include "device/numeric.cuh"
#include "device/stmatrix.cuh"
#include "device/tile_order.cuh"
#include "ops/fp8/gemm/gemm_multiply.cuh"

namespace htree::fp8 {

template <typename Out_, int kRows_, int kColumns_, int kStages_, int kPromoteK_, int kCluster_ = 1,
          Stagger kStagger_ = Stagger::kNone>
struct GemmTileTraits {
  using Out = Out_;
  static constexpr int kRows = kRows_;
  static constexpr int kColumns = kColumns_;
  static constexpr int kPromoteK = kPromoteK_;
  static constexpr int kCluster = kCluster_;
  static constexpr Stagger kStagger = kStagger_;
  static constexpr int kHalves = kRows / 128;  // 64-row parts of a warpgroup
  static constexpr bool kInTurns = kHalves == 1 && kPromoteK == device::kBlockBytes;
  using Shape = device::GemmShape<__nv_fp8_e4m3, kRows, kColumns, kStages_, kCluster, 2>;
  static constexpr int kThreads = 128 * (1 + Shape::kWarpgroups);
  static constexpr int kLoaderRegisters = 40;
  static constexpr int kMultiplierRegisters = 232;
  static_assert(kLoaderRegisters + Shape::kWarpgroups * kMultiplierRegisters <= 504);
  static_assert(kColumns == 128);           // a thread of a warpgroup fetches the scale of one column
  static constexpr int kStoreColumns = 64;  // 128 bytes of a half type: the width of the store's swizzle
  static constexpr int kLoadedRows = kRows / kCluster;  // of a, by one block

  struct Shared {
    device::GemmRing<Shape> ring;
    // Per warp and 64 columns: 16 rows of 128 bytes, swizzled.
    alignas(1024) uint8_t out[Shape::kWarpgroups * 4][kColumns / kStoreColumns][16 * 128];
    float by_column[Shape::kWarpgroups][kColumns];  // inverse scales of the tile's columns
  };
  static constexpr int kSharedBytes = sizeof(Shared) + 1024;  // room to align the base
  static_assert(kSharedBytes <= 232448);
};

// Tensor copies of a [m, k] and b [n, k] by boxes of 128 bytes x kLoadedRows or kColumns rows, and of c
// [m, n] by 64 columns x 16 rows where its rows are aligned.
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

// A warpgroup: the inverse scales of its tile's columns to shared memory, where every column has its own.
template <class Tr>
__device__ __forceinline__ void fetch_column_scales(typename Tr::Shared& shared, int warpgroup,
                                                    const GemmTileArguments<typename Tr::Out>& p,
                                                    int column) {
  if (p.b_scale.stride == 0) {
    return;
  }
  const int thread = static_cast<int>(threadIdx.x % 128);
  device::named_barrier_sync(2 + warpgroup, 128);  // the last tile's have been used
  shared.by_column[warpgroup][thread] = inverse_scale(p.b_scale, column + thread, p.sizes.n);
  device::named_barrier_sync(2 + warpgroup, 128);
}

// A warp scales its 16 rows from `row` on.
template <class Tr>
__device__ __forceinline__ void scale_rows(const typename Tr::Shared& shared, int warpgroup,
                                           const GemmTileArguments<typename Tr::Out>& p, int row,
                                           float (&d)[Tr::kColumns / 2]) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const float by_row[2] = {inverse_scale(p.a_scale, row + lane / 4, p.sizes.m),
                           inverse_scale(p.a_scale, row + lane / 4 + 8, p.sizes.m)};
  if (p.b_scale.stride == 0) {
    const float by_column = 1.0f / *p.b_scale.data;
    const float factors[2] = {joint_factor(by_row[0], by_column), joint_factor(by_row[1], by_column)};
#pragma unroll
    for (int i = 0; i < Tr::kColumns / 2; ++i) {
      d[i] *= factors[i / 2 % 2];
    }
    return;
  }
#pragma unroll
  for (int j = 0; j < Tr::kColumns / 8; ++j) {
    const float2 by_column =
        *reinterpret_cast<const float2*>(&shared.by_column[warpgroup][8 * j + 2 * (lane % 4)]);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      d[4 * j + 2 * h] *= joint_factor(by_row[h], by_column.x);
      d[4 * j + 2 * h + 1] *= joint_factor(by_row[h], by_column.y);
    }
  }
}

// A warp writes its 16 rows from `row` on.
template <class Tr>
__device__ __forceinline__ void store_rows(typename Tr::Shared& shared, const CUtensorMap* map,
                                           const GemmTileArguments<typename Tr::Out>& p, int row, int column,
                                           float (&d)[Tr::kColumns / 2]) {
  const auto value = [&](int i) { return d[i]; };
  if constexpr (sizeof(typename Tr::Out) == 2) {
    if (p.direct == nullptr) {
      store_staged<Tr>(shared, map, row, column, value);
      return;
    }
  }
  store_direct<Tr>(p, row, column, value);
}

// Places of the block's tiles, one after the other: visit(row tile, column tile).
template <class Tr, class Visit>
__device__ __forceinline__ void for_tiles(const device::TileOrder& order, Visit&& visit) {
  const int rank = Tr::kCluster > 1 ? static_cast<int>(device::cluster_block_rank()) : 0;
  for (int tile = blockIdx.x / Tr::kCluster; tile < order.count(); tile += gridDim.x / Tr::kCluster) {
    int row_tile, column_tile;
    order.place(tile, row_tile, column_tile);
    visit(row_tile, column_tile * Tr::kCluster + rank);
  }
}

template <class Tr>
__device__ __forceinline__ void load_tiles(typename Tr::Shared& shared, const GemmTileMaps& maps,
                                           const device::TileOrder& order, int num_blocks) {
  using Shape = typename Tr::Shape;
  device::RingPlace<Shape::kStages> place;
  for_tiles<Tr>(order, [&](int row_tile, int column_tile) {
    device::fill_ring<Shape>(
        shared.ring, place, num_blocks, [&](uint8_t* a, uint8_t* b, int block_idx, device::Barrier* full) {
          const int k = block_idx * Shape::kBlockK;
          if constexpr (Tr::kCluster == 2) {
            const int first = static_cast<int>(device::cluster_block_rank()) * Tr::kLoadedRows;
            device::tensor_load_2d_multicast(a + first * device::kBlockBytes, &maps.a, k,
                                             row_tile * Tr::kRows + first, full, 3);
          } else {
            device::tensor_load_2d(a, &maps.a, k, row_tile * Tr::kRows, full);
          }
          device::tensor_load_2d(b, &maps.b, k, column_tile * Tr::kColumns, full);
        });
  });
}

template <class Tr>
__device__ __forceinline__ void multiply_tiles(typename Tr::Shared& shared, const GemmTileMaps& maps,
                                               const device::TileOrder& order,
                                               const GemmTileArguments<typename Tr::Out>& p) {
  using Shape = typename Tr::Shape;
  const int warpgroup = static_cast<int>(threadIdx.x / 128) - 1;
  const int warp_in_group = static_cast<int>(threadIdx.x / 32 % 4);
  device::RingPlace<Shape::kStages> place;
  for_tiles<Tr>(order, [&](int row_tile, int column_tile) {
    const int column = column_tile * Tr::kColumns;
    fetch_column_scales<Tr>(shared, warpgroup, p, column);
    float sum[Tr::kHalves][Tr::kColumns / 2];
    if constexpr (Tr::kInTurns) {
      multiply_promoted_in_turns<Shape>(shared.ring, place, p.num_blocks, warpgroup, sum[0]);
    } else {
      multiply_promoted<Shape, Tr::kPromoteK, Tr::kHalves, Tr::kStagger>(shared.ring, place, p.num_blocks,
                                                                         warpgroup, sum);
    }
#pragma unroll
    for (int half = 0; half < Tr::kHalves; ++half) {
      const int row = row_tile * Tr::kRows + (warpgroup * Tr::kHalves + half) * 64 + warp_in_group * 16;
      scale_rows<Tr>(shared, warpgroup, p, row, sum[half]);
      store_rows<Tr>(shared, &maps.c, p, row, column, sum[half]);
    }
  });
  if (threadIdx.x % 32 == 0) {
    device::wait_stores<0>();
  }
  __syncwarp();
}

template <class Tr>
__global__ void __launch_bounds__(Tr::kThreads, 1)
    gemm_tile_kernel(const __grid_constant__ GemmTileMaps maps, const device::TileOrder order,
                     const GemmTileArguments<typename Tr::Out> p) {
#if HTREE_SM90A
  extern __shared__ uint8_t raw[];
  auto& shared = *reinterpret_cast<typename Tr::Shared*>((reinterpret_cast<uintptr_t>(raw) + 1023) &
                                                         ~static_cast<uintptr_t>(1023));
  if (threadIdx.x == 0) {
    device::init_ring(shared.ring);
    device::fence_barrier_init();
    device::prefetch_descriptor(&maps.a);
    device::prefetch_descriptor(&maps.b);
  }
  if constexpr (Tr::kCluster > 1) {
    device::cluster_sync();
  } else {
    __syncthreads();
  }
  if (threadIdx.x < 128) {
    device::lower_registers<Tr::kLoaderRegisters>();
    if (threadIdx.x == 0) {
      load_tiles<Tr>(shared, maps, order, p.num_blocks);
    }
    __syncwarp();
  } else {
    device::raise_registers<Tr::kMultiplierRegisters>();
    multiply_tiles<Tr>(shared, maps, order, p);
  }
  if constexpr (Tr::kCluster > 1) {
    device::cluster_sync();  // no block leaves while another may still signal its barriers
  }
#else
  __trap();  // the launcher does not come here: see gemm_is_compiled_for_hopper()
#endif
}

}  // namespace htree::fp8
