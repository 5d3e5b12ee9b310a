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
#include "device/mma.cuh"
#include "device/operand_copy.cuh"
#include "device/shared_address.cuh"
#include "device/stmatrix.cuh"
#include "device/sum_exchange.cuh"
#include "device/tile_order.cuh"
#include "device/tile_shares.h"
#include "ops/gated_mlp/activation.cuh"
#include "ops/gated_mlp/gated_mlp_params.h"
#include "ops/gated_mlp/gated_mlp_tile_exchange.cuh"
#include "ops/gated_mlp/gated_mlp_tile_work.cuh"

namespace htree::gated_mlp {

// kKeepsProducts: g and u are stored too, for the backward.
template <typename T_, Activation kActivation_, int kColumns_, int kStages_, int kCluster_,
          bool kKeepsProducts_>
struct TileTraits {
  using T = T_;
  static constexpr Activation kActivation = kActivation_;
  static constexpr bool kKeepsProducts = kKeepsProducts_;
  static constexpr int kRows = 128;
  static constexpr int kColumns = kColumns_;  // of the output
  static constexpr int kCluster = kCluster_;
  using Shape = device::GemmShape<T, kRows, 2 * kColumns, kStages_, kCluster>;
  static constexpr int kThreads = 128 * (1 + Shape::kWarpgroups);
  static constexpr int kLoaderRegisters = 40;
  static constexpr int kMultiplierRegisters = 232;
  static_assert(kLoaderRegisters + Shape::kWarpgroups * kMultiplierRegisters <= 504);
  static constexpr int kStoreColumns = 64;  // 128 bytes: the width of the store's swizzle
  static_assert(kColumns % kStoreColumns == 0);

  struct Shared {
    device::GemmRing<Shape> ring;
    // Per warp and 64 columns: 16 rows of 128 bytes, swizzled.
    alignas(1024) uint8_t out[Shape::kWarpgroups * 4][kColumns / kStoreColumns][16 * 128];
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

// Where the warp's 16 rows of one result go: by tensor copies, which cut off what lies outside,
// or, where rows of the result are not aligned to 16 bytes, element by element.
template <typename T>
struct Destination {
  const CUtensorMap* map;
  T* unaligned;  // [rows, inner], or null
};

// A warp writes value(i) for its accumulator places i in [0, kColumns / 2), to rows from `row` and columns
// from `column` on.
template <class Tr, int kColumns, class Value>
__device__ __forceinline__ void store_tile(typename Tr::Shared& shared, const Destination<typename Tr::T>& to,
                                           const Sizes& sizes, int row, int column, Value&& value) {
  using T = typename Tr::T;
  const int warp = static_cast<int>(threadIdx.x / 32) - 4;
  const int lane = static_cast<int>(threadIdx.x % 32);
  if (lane == 0) {
    device::wait_stores_read<0>();
  }
  __syncwarp();
#pragma unroll
  for (int part = 0; part < kColumns / Tr::kStoreColumns; ++part) {
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {  // 16 columns
      uint32_t packed[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // 8 columns i / 2, row half i % 2
        const int at = part * 32 + pair * 8 + (i / 2) * 4 + (i % 2) * 2;
        packed[i] = device::pack_pair<T>(value(at), value(at + 1));
      }
      // Lane i gives the address of row i % 16, 8-column chunk 2 * pair + i / 16.
      const int chunk = (2 * pair + lane / 16) ^ (lane % 8);
      device::store_matrices(device::shared_address(shared.out[warp][part]) + (lane % 16) * 128 + chunk * 16,
                             packed);
    }
  }
  if (to.unaligned != nullptr) {
    __syncwarp();
    for (int i = lane; i < 16 * kColumns; i += 32) {
      const int r = i / kColumns;
      const int c = i % kColumns;
      if (row + r < sizes.rows && column + c < sizes.inner) {
        const uint8_t* from = shared.out[warp][c / 64] + r * 128 + (((c % 64 / 8) ^ (r % 8)) * 8 + c % 8) * 2;
        to.unaligned[(row + r) * sizes.inner + column + c] = *reinterpret_cast<const T*>(from);
      }
    }
    return;
  }
  device::fence_async_shared();
  __syncwarp();
  if (lane == 0) {
#pragma unroll
    for (int part = 0; part < kColumns / Tr::kStoreColumns; ++part) {
      device::tensor_store_2d(to.map, shared.out[warp][part], column + part * Tr::kStoreColumns, row);
    }
    device::commit_stores();
  }
}

// A warp's results for its 16 rows and kColumns columns; g stands in d[0 ... kColumns / 2), u behind it.
template <class Tr, int kColumns>
__device__ __forceinline__ void store_results(typename Tr::Shared& shared, const TileMaps& maps,
                                              const TileArguments<typename Tr::T>& arguments, int row,
                                              int column, const float (&d)[kColumns]) {
  constexpr int kUp = kColumns / 2;
  if constexpr (Tr::kKeepsProducts) {
    store_tile<Tr, kColumns>(shared, {&maps.gate_product, arguments.unaligned_gate}, arguments.sizes, row,
                             column, [&](int i) { return d[i]; });
    store_tile<Tr, kColumns>(shared, {&maps.up_product, arguments.unaligned_up}, arguments.sizes, row, column,
                             [&](int i) { return d[kUp + i]; });
  }
  store_tile<Tr, kColumns>(shared, {&maps.out, arguments.unaligned_out}, arguments.sizes, row, column,
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
          exchange_halves<Tr>(shared, rank, warpgroup, d, own);
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
