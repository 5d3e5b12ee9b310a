// out = (x Wg^T) * act(x Wu^T) for many rows, by persistent blocks (gated_mlp_tile_block.cuh). A tile is
// kRows rows of x against kColumns rows of each weight. Both weights stand side by side in one stage, so
// one product of n = 2 * kColumns serves both, and a thread ends up with g and u of the same elements. In
// a cluster of two, the blocks take adjacent row tiles, and each loads one of the weights for both. Where
// the last wave has no more tiles than clusters, both blocks take half of the k of one tile and finish
// half of its columns.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "device/shared_memory.cuh"
#include "device/sm90/gemm_pipeline.cuh"
#include "device/sm90/operand_copy.cuh"
#include "device/sm90/tile_order.cuh"
#include "ops/gated_mlp/cuda/activation.cuh"
#include "ops/gated_mlp/cuda/sm90/gated_mlp_tile_block.cuh"
#include "ops/gated_mlp/cuda/sm90/gated_mlp_tile_store.cuh"
#include "ops/gated_mlp/gated_mlp_params.h"

namespace htree::gated_mlp {

// kKeepsProducts: g and u are stored too, for the backward.
template <typename T_, Activation kActivation_, int kRows_, int kColumns_, int kStages_, int kCluster_,
          bool kKeepsProducts_>
struct TileTraits : TileBlock<device::GemmShape<T_, kRows_, 2 * kColumns_, kStages_, kCluster_>,
                              kColumns_ % kStoreColumns == 0 ? kColumns_ : 0> {
  static constexpr Activation kActivation = kActivation_;
  static constexpr bool kKeepsProducts = kKeepsProducts_;
  static constexpr int kColumns = kColumns_;  // columns of the output
};

// Descriptors of tensor copies: of x [rows, hidden] and the weights [inner, hidden] by boxes of 128 bytes x
// kRows or kColumns rows, of the results [rows, inner] by boxes of 64 columns x 16 rows.
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
  device::SplitTiles split;
  // Where tensor copies do not store a result [rows, inner], because its rows are not aligned to 16 bytes or the columns
  // of a tile are no multiple of 64, the result; else null.
  T* unaligned_out;
  T* unaligned_gate;
  T* unaligned_up;
};

template <class Tr>
__device__ __forceinline__ void load_tile(typename Tr::Shared& shared,
                                          device::RingPlace<Tr::Shape::kStages>& place, const TileMaps& maps,
                                          const Sizes& sizes, const device::TileWork& work) {
  using Shape = typename Tr::Shape;
  constexpr int kWeightBytes = Tr::kColumns * device::kBlockBytes;
  const int rank = static_cast<int>(blockIdx.x) % Tr::kCluster;
  const device::OperandCopy<Tr::kRows, 1> of_x(maps.x, work.row, sizes.rows);
  const bool by_both = Tr::kCluster == 2 && !work.split;
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
}

// Stores a warp's results for its 16 rows and kColumns columns. g stands in d[0 ... kColumns /
// 2), u behind it.
template <class Tr, int kColumns>
__device__ __forceinline__ void store_results(typename Tr::Shared& shared, const TileMaps& maps,
                                              const TileArguments<typename Tr::T>& arguments, int row,
                                              int column, const float (&d)[kColumns]) {
  using T = typename Tr::T;
  constexpr int kUp = kColumns / 2;
  const Sizes& s = arguments.sizes;
  const auto store = [&](const CUtensorMap& map, T* unaligned, auto&& value) {
    if constexpr (Tr::kStaged == 0) {
      store_tile_from_registers<T, kColumns>(unaligned, s.rows, s.inner, row, column, value);
    } else {
      store_tile<T, kColumns>(shared.out[threadIdx.x / 32 - 4], {&map, unaligned, s.rows, s.inner}, row,
                              column, value);
    }
  };
  if constexpr (Tr::kKeepsProducts) {
    store(maps.gate_product, arguments.unaligned_gate, [&](int i) { return d[i]; });
    store(maps.up_product, arguments.unaligned_up, [&](int i) { return d[kUp + i]; });
  }
  store(maps.out, arguments.unaligned_out,
        [&](int i) { return d[i] * activate<Tr::kActivation>(d[kUp + i]); });
}

template <class Tr>
__global__ void __launch_bounds__(Tr::kThreads, 1)
    tile_kernel(const __grid_constant__ TileMaps maps, const device::TileOrder order,
                const TileArguments<typename Tr::T> arguments) {
#if HTREE_SM90A
  extern __shared__ uint8_t raw[];
  auto& shared = device::align_shared<typename Tr::Shared>(raw);
  if (threadIdx.x == 0) {
    device::prefetch_descriptor(&maps.x.whole);
    device::prefetch_descriptor(&maps.gate);
    device::prefetch_descriptor(&maps.up);
    device::prefetch_descriptor(&maps.out);
  }
  run_tiles<Tr>(
      shared, order, arguments.split,
      [&](const device::TileWork& work, device::RingPlace<Tr::Shape::kStages>& place) {
        load_tile<Tr>(shared, place, maps, arguments.sizes, work);
      },
      [&](const device::TileWork& work, int warpgroup, int row, const float(&d)[Tr::kColumns]) {
        if constexpr (Tr::kCluster == 2) {
          if (work.split) {
            constexpr int kOwn = Tr::kColumns / 2;
            const int rank = static_cast<int>(blockIdx.x) % 2;
            float own[kOwn];
            reduce_sums<Tr, 2>(shared, rank, warpgroup, d, own);
            store_results<Tr, kOwn>(shared, maps, arguments, work.row + row, work.column + rank * kOwn, own);
            return;
          }
        }
        store_results<Tr, Tr::kColumns>(shared, maps, arguments, work.row + row, work.column, d);
      });
#else
  __trap();  // no launcher comes here: see has_hopper_kernels()
#endif
}

}  // namespace htree::gated_mlp
