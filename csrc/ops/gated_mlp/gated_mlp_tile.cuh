// out = (x Wg^T) * act(x Wu^T) for many rows: persistent blocks, one warpgroup that loads and two that
// multiply. A tile is 128 rows of x against kColumns rows of each weight; both weights stand side by side in
// one stage, so one product of n = 2 * kColumns serves them, and a thread ends up with g and u of the same
// elements. In a cluster of two, the blocks take adjacent row tiles, and each loads one of the weights for
// both; where the last turn has no more tiles than clusters, both take half of the k of one tile and finish
// half of its columns.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "device/gemm_pipeline.cuh"
#include "device/hopper_limits.h"
#include "device/operand_copy.cuh"
#include "device/shared_address.cuh"
#include "device/sum_exchange.cuh"
#include "device/tile_order.cuh"
#include "device/tile_shares.h"
#include "ops/gated_mlp/activation.cuh"
#include "ops/gated_mlp/gated_mlp_params.h"
#include "ops/gated_mlp/gated_mlp_tile_exchange.cuh"
#include "ops/gated_mlp/gated_mlp_tile_store.cuh"
#include "ops/gated_mlp/gated_mlp_tile_work.cuh"

namespace htree::gated_mlp {

// kKeepsProducts: g and u are stored too, for the backward.
template <typename T_, Activation kActivation_, int kRows_, int kColumns_, int kStages_, int kCluster_,
          bool kKeepsProducts_>
struct TileTraits {
  using T = T_;
  static constexpr Activation kActivation = kActivation_;
  static constexpr bool kKeepsProducts = kKeepsProducts_;
  static constexpr int kRows = kRows_;
  static constexpr int kColumns = kColumns_;  // of the output
  static constexpr int kCluster = kCluster_;
  using Shape = device::GemmShape<T, kRows, 2 * kColumns, kStages_, kCluster>;
  static constexpr int kThreads = 128 * (1 + Shape::kWarpgroups);
  static constexpr int kLoaderRegisters = 40;
  static constexpr int kMultiplierRegisters = Shape::kWarpgroups == 2 ? 232 : 152;
  static_assert(kLoaderRegisters + Shape::kWarpgroups * kMultiplierRegisters <= 504);

  struct Shared {
    device::GemmRing<Shape> ring;
    alignas(1024) StagedRows out[Shape::kWarpgroups * 4][kColumns / kStoreColumns];  // per warp
    device::SumExchange exchange[Shape::kWarpgroups];
  };
  static constexpr int kSharedBytes = sizeof(Shared) + device::kSharedAlignment;
  static_assert(kSharedBytes <= device::kHopperSharedBytes);
};

// Tensor copies of x [rows, hidden] and the weights [inner, hidden] by boxes of 128 bytes x kRows or kColumns
// rows, and of the results [rows, inner] by 64 columns x 16 rows.
struct TileMaps {
  device::OperandMaps x;
  CUtensorMap gate;
  CUtensorMap up;
  CUtensorMap out;
  CUtensorMap gate_product;
  CUtensorMap up_product;
};

template <typename T>
struct TileArguments {
  Sizes sizes;
  device::TileShares shares;
  // [rows, inner], where their rows are not aligned to 16 bytes; else null
  T* unaligned_out;
  T* unaligned_gate;
  T* unaligned_up;
};

template <class Tr>
__device__ __forceinline__ void load_tiles(typename Tr::Shared& shared, const TileMaps& maps,
                                           const device::TileOrder& order,
                                           const TileArguments<typename Tr::T>& arguments) {
  using Shape = typename Tr::Shape;
  constexpr int kWeightBytes = Tr::kColumns * device::kBlockBytes;
  const int rank = static_cast<int>(blockIdx.x) % Tr::kCluster;
  device::RingPlace<Shape::kStages> place;
  for_tiles<Tr>(order, arguments.shares, [&](const TileWork& work) {
    const device::OperandCopy<Tr::kRows, 1> of_x(maps.x, work.row, arguments.sizes.rows);
    const bool by_both = Tr::kCluster == 2 && !work.shared;
    device::fill_ring<Shape>(shared.ring, place, work.count, of_x.bytes + Shape::kBytesB,
                             [&](uint8_t* a, uint8_t* b, int block_idx, device::Barrier* full) {
                               const int k = (work.first + block_idx) * Shape::kBlockK;
                               of_x.start(a, k, full);
                               if (by_both) {
                                 device::tensor_load_2d_multicast(b + rank * kWeightBytes,
                                                                  rank == 0 ? &maps.gate : &maps.up, k,
                                                                  work.column, full, 3);
                               } else {
                                 device::tensor_load_2d(b, &maps.gate, k, work.column, full);
                                 device::tensor_load_2d(b + kWeightBytes, &maps.up, k, work.column, full);
                               }
                             });
  });
}

// A warp's results for its 16 rows and kColumns columns; g stands in d[0 ... kColumns / 2), u behind it.
template <class Tr, int kColumns>
__device__ __forceinline__ void store_results(typename Tr::Shared& shared, const TileMaps& maps,
                                              const TileArguments<typename Tr::T>& arguments, int row,
                                              int column, const float (&d)[kColumns]) {
  using T = typename Tr::T;
  constexpr int kUp = kColumns / 2;
  StagedRows* staged = shared.out[threadIdx.x / 32 - 4];
  const Sizes& s = arguments.sizes;
  if constexpr (Tr::kKeepsProducts) {
    store_tile<T, kColumns>(staged, {&maps.gate_product, arguments.unaligned_gate, s.rows, s.inner}, row,
                            column, [&](int i) { return d[i]; });
    store_tile<T, kColumns>(staged, {&maps.up_product, arguments.unaligned_up, s.rows, s.inner}, row, column,
                            [&](int i) { return d[kUp + i]; });
  }
  store_tile<T, kColumns>(staged, {&maps.out, arguments.unaligned_out, s.rows, s.inner}, row, column,
                          [&](int i) { return d[i] * activate<Tr::kActivation>(d[kUp + i]); });
}

template <class Tr>
__global__ void __launch_bounds__(Tr::kThreads, 1)
    tile_kernel(const __grid_constant__ TileMaps maps, const device::TileOrder order,
                const TileArguments<typename Tr::T> arguments) {
#if HTREE_SM90A
  using Shape = typename Tr::Shape;
  extern __shared__ uint8_t raw[];
  auto& shared = device::align_shared<typename Tr::Shared>(raw);

  if (threadIdx.x == 0) {
    device::init_ring(shared.ring);
    for (int i = 0; i < Shape::kWarpgroups; ++i) {
      device::init_exchange(shared.exchange[i]);
    }
    device::fence_barrier_init();
    device::prefetch_descriptor(&maps.x.whole);
    device::prefetch_descriptor(&maps.gate);
    device::prefetch_descriptor(&maps.up);
    device::prefetch_descriptor(&maps.out);
  }
  if constexpr (Tr::kCluster > 1) {
    device::cluster_sync();
  } else {
    __syncthreads();
  }

  const int warpgroup = device::uniform(static_cast<int>(threadIdx.x / 128)) - 1;
  if (warpgroup < 0) {
    device::lower_registers<Tr::kLoaderRegisters>();
    if (threadIdx.x == 0) {
      load_tiles<Tr>(shared, maps, order, arguments);
    }
    __syncwarp();
  } else {
    device::raise_registers<Tr::kMultiplierRegisters>();
    const int row_in_tile = warpgroup * 64 + static_cast<int>(threadIdx.x / 32 % 4) * 16;
    device::RingPlace<Shape::kStages> place;
    for_tiles<Tr>(order, arguments.shares, [&](const TileWork& work) {
      float d[Tr::kColumns];
      device::multiply_ring<Shape>(shared.ring, place, work.count, warpgroup, d);
      const int row = work.row + row_in_tile;
      if constexpr (Tr::kCluster == 2) {
        if (work.shared) {
          constexpr int kOwn = Tr::kColumns / 2;
          const int rank = static_cast<int>(blockIdx.x) % 2;
          float own[kOwn];
          exchange_halves<Tr, 2>(shared, rank, warpgroup, d, own);
          store_results<Tr, kOwn>(shared, maps, arguments, row, work.column + rank * kOwn, own);
          return;
        }
      }
      store_results<Tr, Tr::kColumns>(shared, maps, arguments, row, work.column, d);
    });
    if (threadIdx.x % 32 == 0) {
      device::wait_stores<0>();
    }
    __syncwarp();
  }
  if constexpr (Tr::kCluster > 1) {
    device::cluster_sync();  // no block leaves while another may still signal its barriers
  }
#else
  __trap();  // the launcher does not come here: see has_hopper_kernels()
#endif
}

}  // namespace htree::gated_mlp
