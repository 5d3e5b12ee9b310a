// The products of the backward, given dg and du [rows, inner]: dx = dg Wg + du Wu as one sum over 2 * inner,
// or dWg = dg^T x and dWu = du^T x, one below the other. Blocks are persistent (gated_mlp_tile_block.cuh). A
// tile is 128 rows x 256 columns of a result. A cluster takes two tiles, one below the other, and each of its
// blocks loads half of the columns for both. The operands are read where they stand: one that is not
// contiguous along the sum is MN-major.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <type_traits>

#include "device/shared_memory.cuh"
#include "device/sm90/gemm_pipeline.cuh"
#include "device/sm90/operand_copy.cuh"
#include "device/sm90/tile_order.cuh"
#include "ops/gated_mlp/cuda/sm90/gated_mlp_tile_block.cuh"
#include "ops/gated_mlp/cuda/sm90/gated_mlp_tile_store.cuh"

namespace htree::gated_mlp {

// Four stages, clusters of two blocks, two consumer warpgroups.
template <typename T, bool kOfWeights>
using GradientShape =
    device::GemmShape<T, 128, 256, 4, 2, 2, kOfWeights ? device::Major::kMN : device::Major::kK,
                      device::Major::kMN>;

template <typename T_, bool kOfWeights_>
struct GradientTraits : TileBlock<GradientShape<T_, kOfWeights_>, 128> {
  static constexpr bool kOfWeights = kOfWeights_;
  static constexpr int kColumns = GradientShape<T_, kOfWeights_>::kRowsB;
};

// Descriptors of tensor copies. dg and du: for dx by rows, as device::OperandCopy takes them; for the weights
// by columns, as device::ColumnCopy takes them, in `whole`. The weights or x: by columns. The results: by
// boxes of 64 columns x 16 rows.
struct GradientMaps {
  device::OperandMaps products[2];
  CUtensorMap factors[2];  // the second one is for dx alone
  CUtensorMap results[2];  // the second one is for the weights alone
};

struct GradientArguments {
  int64_t rows;  // rows of a result
  int64_t columns;
  int num_blocks;  // blocks of k of one product
  int rows_apart;  // rows from the tiles of the first result to those of the second one
  device::SplitTiles split;
};

// Which result a tile belongs to. `row`, counted from the first result on, becomes a row of that result.
template <class Tr>
__device__ __forceinline__ int result_of(const GradientArguments& arguments, int& row) {
  const int result = Tr::kOfWeights && row >= arguments.rows_apart ? 1 : 0;
  row -= result * arguments.rows_apart;
  return result;
}

template <class Tr>
__device__ __forceinline__ void load_gradient_tile(typename Tr::Shared& shared,
                                                   device::RingPlace<Tr::Shape::kStages>& place,
                                                   const GradientMaps& maps,
                                                   const GradientArguments& arguments,
                                                   const device::TileWork& work) {
  using Shape = typename Tr::Shape;
  using RowCopy =
      std::conditional_t<Tr::kOfWeights, device::ColumnCopy<Tr::kRows>, device::OperandCopy<Tr::kRows, 1>>;
  const int rank = static_cast<int>(blockIdx.x) % Tr::kCluster;
  int row = work.row;
  const int result = result_of<Tr>(arguments, row);
  const device::ColumnCopy<Tr::kColumns> of_columns(work.column, arguments.columns);
  const auto rows_of = [&](int product) {
    if constexpr (Tr::kOfWeights) {
      return RowCopy(row, arguments.rows);
    } else {
      return RowCopy(maps.products[product], row, arguments.rows);
    }
  };
  const RowCopy first = rows_of(0);
  const RowCopy second = rows_of(1);
  device::fill_ring<Shape>(shared.ring, place, work.count, first.bytes + of_columns.bytes,
                           [&](uint8_t* a, uint8_t* b, int block_idx, device::Barrier* full) {
                             const int block = work.first + block_idx;
                             const bool in_second = !Tr::kOfWeights && block >= arguments.num_blocks;
                             const int k =
                                 (in_second ? block - arguments.num_blocks : block) * Shape::kBlockK;
                             if constexpr (Tr::kOfWeights) {
                               first.start(a, &maps.products[result].whole, k, full);
                             } else if (in_second) {
                               second.start(a, k, full);
                             } else {
                               first.start(a, k, full);
                             }
                             const CUtensorMap* factor = &maps.factors[in_second ? 1 : 0];
                             if (work.split) {
                               of_columns.start(b, factor, k, full);
                             } else {
                               of_columns.start_share(b, factor, k, rank, full);
                             }
                           });
}

// Stores a warp's sums of its 16 rows: half of the columns at a time, or only the columns
// that this block finishes.
template <class Tr>
__device__ __forceinline__ void store_gradient(typename Tr::Shared& shared, const GradientMaps& maps,
                                               const GradientArguments& arguments,
                                               const device::TileWork& work, int warpgroup, int row_in_tile,
                                               const float (&d)[Tr::kColumns / 2]) {
  using T = typename Tr::T;
  constexpr int kStored = Tr::kStaged;
  static_assert(2 * kStored == Tr::kColumns);
  StagedRows* staged = shared.out[threadIdx.x / 32 - 4];
  int row = work.row;
  const int result = result_of<Tr>(arguments, row);
  row += row_in_tile;
  const Destination<T> to{&maps.results[result], nullptr, arguments.rows, arguments.columns};
  if (work.split) {
    const int rank = static_cast<int>(blockIdx.x) % 2;
    float own[kStored / 2];
    reduce_sums<Tr, 1>(shared, rank, warpgroup, d, own);
    store_tile<T, kStored>(staged, to, row, work.column + rank * kStored, [&](int i) { return own[i]; });
    return;
  }
  store_tile<T, kStored>(staged, to, row, work.column, [&](int i) { return d[i]; });
  store_tile<T, kStored>(staged, to, row, work.column + kStored, [&](int i) { return d[kStored / 2 + i]; });
}

template <class Tr>
__global__ void __launch_bounds__(Tr::kThreads, 1)
    gradient_kernel(const __grid_constant__ GradientMaps maps, const device::TileOrder order,
                    const GradientArguments arguments) {
#if HTREE_SM90A
  extern __shared__ uint8_t raw[];
  auto& shared = device::align_shared<typename Tr::Shared>(raw);
  if (threadIdx.x == 0) {
    device::prefetch_descriptor(&maps.products[0].whole);
    device::prefetch_descriptor(&maps.factors[0]);
    device::prefetch_descriptor(&maps.results[0]);
  }
  run_tiles<Tr>(
      shared, order, arguments.split,
      [&](const device::TileWork& work, device::RingPlace<Tr::Shape::kStages>& place) {
        load_gradient_tile<Tr>(shared, place, maps, arguments, work);
      },
      [&](const device::TileWork& work, int warpgroup, int row, const float(&d)[Tr::kColumns / 2]) {
        store_gradient<Tr>(shared, maps, arguments, work, warpgroup, row, d);
      });
#else
  __trap();  // no launcher comes here: see has_hopper_kernels()
#endif
}

}  // namespace htree::gated_mlp
