// c = (a b^T) / (s_a s_b): persistent blocks, one warpgroup that loads and one or two that multiply. A tile
// is kRows rows of a against kColumns rows of b. In a cluster, the blocks take neighbouring columns of one
// row tile, and each loads its share of the rows of a for all.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "device/kernel_overlap.cuh"
#include "device/tile_order.cuh"
#include "ops/fp8/gemm/gemm_multiply.cuh"
#include "ops/fp8/gemm/gemm_store.cuh"

namespace htree::fp8 {

template <typename Out_, int kWarpgroups_, int kRows_, int kColumns_, int kStages_, int kPromoteK_,
          int kCluster_>
struct GemmTileTraits {
  using Out = Out_;
  static constexpr int kRows = kRows_;
  static constexpr int kColumns = kColumns_;
  static constexpr int kPromoteK = kPromoteK_;
  static constexpr int kCluster = kCluster_;
  static constexpr int kWarpgroups = kWarpgroups_;          // that multiply
  static constexpr int kHalves = kRows / 64 / kWarpgroups;  // 64-row parts of a warpgroup
  static_assert(kHalves * kWarpgroups * 64 == kRows);
  static constexpr bool kInTurns = kHalves == 1 && kPromoteK == device::kBlockBytes;
  using Shape = device::GemmShape<__nv_fp8_e4m3, kRows, kColumns, kStages_, kCluster, kWarpgroups>;
  static constexpr int kThreads = 128 * (1 + kWarpgroups);
  static constexpr bool kShiftsRegisters = kWarpgroups > 1;
  static constexpr int kLoaderRegisters = 40;
  static constexpr int kMultiplierRegisters = 232;
  static_assert(!kShiftsRegisters || kLoaderRegisters + kWarpgroups * kMultiplierRegisters <= 504);
  static constexpr int kLoadedRows = kRows / kCluster;  // of a, by one block
  static_assert(kLoadedRows % 8 == 0);                  // whole rows of the swizzle
  using Store = GemmStore<Out, kColumns>;

  struct Shared {
    device::GemmRing<Shape> ring;
    typename Store::Shared store[kWarpgroups * 4];  // per warp
    float by_column[kWarpgroups][2][kColumns];  // inverse scales of the tile's columns, of two tiles in turn
  };
  static constexpr int kSharedBytes = sizeof(Shared) + 1024;  // room to align the base
  static_assert(kSharedBytes <= 232448);
};

// Tensor copies of a [m, k] and b [n, k] by boxes of 128 bytes x kLoadedRows or kColumns rows.
struct GemmTileMaps {
  CUtensorMap a;
  CUtensorMap b;
};

template <typename Out>
struct GemmTileArguments {
  GemmSizes sizes;
  GemmScale a_scale;
  GemmScale b_scale;
  Out* c;  // [m, n], contiguous
  int num_blocks;
};

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
          if constexpr (Tr::kCluster > 1) {
            const int first = static_cast<int>(device::cluster_block_rank()) * Tr::kLoadedRows;
            device::tensor_load_2d_multicast(a + first * device::kBlockBytes, &maps.a, k,
                                             row_tile * Tr::kRows + first, full, (1 << Tr::kCluster) - 1);
          } else {
            device::tensor_load_2d(a, &maps.a, k, row_tile * Tr::kRows, full);
          }
          device::tensor_load_2d(b, &maps.b, k, column_tile * Tr::kColumns, full);
        });
  });
}

// A warp scales its 16 rows. `by_column` points at the inverse scales of the tile's columns, or is null where
// all have the one that by_row holds already.
template <int kColumns>
__device__ __forceinline__ void scale_rows(const float (&by_row)[2], const float* by_column,
                                           float (&d)[kColumns / 2]) {
  if (by_column == nullptr) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      d[i] *= by_row[i / 2 % 2];
    }
    return;
  }
  const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) {
    const float2 two = *reinterpret_cast<const float2*>(by_column + 8 * j + 2 * (lane % 4));
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      d[4 * j + 2 * h] *= joint_factor(by_row[h], two.x);
      d[4 * j + 2 * h + 1] *= joint_factor(by_row[h], two.y);
    }
  }
}

template <class Tr>
__device__ __forceinline__ void multiply_tiles(typename Tr::Shared& shared, const device::TileOrder& order,
                                               const GemmTileArguments<typename Tr::Out>& p) {
  using Shape = typename Tr::Shape;
  const int warpgroup = static_cast<int>(threadIdx.x / 128) - 1;
  const int warp_in_group = static_cast<int>(threadIdx.x / 32 % 4);
  const int thread = static_cast<int>(threadIdx.x % 128);
  const int lane = thread % 32;
  const bool one_column_scale = p.b_scale.stride == 0;
  device::RingPlace<Shape::kStages> place;
  int slot = 0;
  for_tiles<Tr>(order, [&](int row_tile, int column_tile) {
    const int column = column_tile * Tr::kColumns;
    const int first_row = row_tile * Tr::kRows + warpgroup * Tr::kHalves * 64 + warp_in_group * 16;
    // The scales are fetched before the products, which hide their latency, and used behind them.
    float by_row[Tr::kHalves][2];
#pragma unroll
    for (int i = 0; i < 2 * Tr::kHalves; ++i) {
      by_row[i / 2][i % 2] =
          inverse_scale(p.a_scale, first_row + i / 2 * 64 + i % 2 * 8 + lane / 4, p.sizes.m);
    }
    const float by_own_column = inverse_scale(p.b_scale, column + thread, p.sizes.n);

    float sum[Tr::kHalves][Tr::kColumns / 2];
    if constexpr (Tr::kInTurns) {
      multiply_promoted_in_turns<Shape>(shared.ring, place, p.num_blocks, warpgroup, sum[0]);
    } else {
      multiply_promoted<Shape, Tr::kPromoteK, Tr::kHalves>(shared.ring, place, p.num_blocks, warpgroup, sum);
    }

    const float* by_column = nullptr;
    if (one_column_scale) {
#pragma unroll
      for (int i = 0; i < 2 * Tr::kHalves; ++i) {
        by_row[i / 2][i % 2] = joint_factor(by_row[i / 2][i % 2], by_own_column);
      }
    } else {
      // Two slots in turn: who writes one has passed the barrier of the tile before, behind which nobody
      // reads it any more.
      by_column = shared.by_column[warpgroup][slot];
      if (thread < Tr::kColumns) {
        shared.by_column[warpgroup][slot][thread] = by_own_column;
      }
      slot ^= 1;
      device::named_barrier_sync(1 + warpgroup, 128);
    }
#pragma unroll
    for (int half = 0; half < Tr::kHalves; ++half) {
      scale_rows<Tr::kColumns>(by_row[half], by_column, sum[half]);
      Tr::Store::rows(shared.store[warpgroup * 4 + warp_in_group], p.c, p.sizes, first_row + half * 64,
                      column, sum[half]);
    }
  });
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
  if (threadIdx.x == 0) {
    device::let_next_kernel_begin();
  }
  device::wait_for_previous_kernels();
  if (threadIdx.x < 128) {
    if constexpr (Tr::kShiftsRegisters) {
      device::lower_registers<Tr::kLoaderRegisters>();
    }
    if (threadIdx.x == 0) {
      load_tiles<Tr>(shared, maps, order, p.num_blocks);
    }
    __syncwarp();
  } else {
    if constexpr (Tr::kShiftsRegisters) {
      device::raise_registers<Tr::kMultiplierRegisters>();
    }
    multiply_tiles<Tr>(shared, order, p);
  }
  if constexpr (Tr::kCluster > 1) {
    device::cluster_sync();  // no block leaves while another may still signal its barriers
  }
#else
  __trap();  // the launcher does not come here: see gemm_is_compiled_for_hopper()
#endif
}

}  // namespace htree::fp8
