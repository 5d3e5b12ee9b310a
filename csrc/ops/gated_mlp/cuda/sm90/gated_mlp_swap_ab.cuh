// out = (x Wg^T) * act(x Wu^T) for some hundred rows, by persistent blocks (gated_mlp_tile_block.cuh). Swap AB: as in
// gated_mlp_stream.cuh the weights are the M = 64 of the products, so that a tile has as many rows of x
// as N allows in steps of 16, and few of them are padding. A warpgroup multiplies 64 rows of Wg and the same
// 64 rows of Wu, so a thread ends up with g and u of the same elements. The blocks of a cluster take adjacent
// columns of the output, and each loads half of the rows of x for both. Where the last wave has no more tiles
// than clusters, it is a stream-K tail: a tile is split along K over both blocks, and each finishes half of its rows.
//
// "Row" and "column" of a tile, as gated_mlp_tile_block.cuh counts them, are those of the transposed output.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "device/mma.cuh"
#include "device/shared_memory.cuh"
#include "device/sizes.h"
#include "device/sm90/gemm_pipeline.cuh"
#include "device/sm90/operand_copy.cuh"
#include "device/sm90/tile_order.cuh"
#include "ops/gated_mlp/cuda/activation.cuh"
#include "ops/gated_mlp/cuda/sm90/gated_mlp_tile_block.cuh"
#include "ops/gated_mlp/cuda/sm90/gated_mlp_tile_store.cuh"
#include "ops/gated_mlp/gated_mlp_params.h"

namespace htree::gated_mlp {

// kKeepsProducts: g and u are stored too, for the backward.
template <typename T_, Activation kActivation_, int kRowsOfX_, int kStages_, bool kKeepsProducts_>
struct SwapAbTraits : TileBlock<device::GemmShape<T_, 256, kRowsOfX_, kStages_, 2, 2>, 0> {
  static constexpr Activation kActivation = kActivation_;
  static constexpr bool kKeepsProducts = kKeepsProducts_;
  static constexpr int kRows = 128;  // columns of the output
  static constexpr int kColumns = kRowsOfX_;
  static constexpr int kShare = kRowsOfX_ / 2;  // rows of x that a block loads for its cluster
  static_assert(kColumns % 16 == 0);
};

// Descriptors of tensor copies by boxes 128 bytes wide: of x [rows, hidden] x kShare rows, or the rows of the
// last tile that exist (device::OperandMaps says why); of the weights [inner, hidden] x 64 rows.
struct SwapAbMaps {
  device::OperandMaps x;
  CUtensorMap gate;
  CUtensorMap up;
};

// The results are [rows, inner]; gate and up are null unless they are kept.
template <typename T>
struct SwapAbArguments {
  Sizes sizes;
  device::SplitTiles split;
  T* out;
  T* gate;
  T* up;
};

// Copies of rows and of boxes of 64 columns that do not exist are left out, and so are their bytes.
template <class Tr>
__device__ __forceinline__ void load_swap_ab(typename Tr::Shared& shared,
                                             device::RingPlace<Tr::Shape::kStages>& place,
                                             const SwapAbMaps& maps, const Sizes& sizes,
                                             const device::TileWork& work) {
  using Shape = typename Tr::Shape;
  constexpr int kBoxBytes = 64 * device::kBlockBytes;
  constexpr int kShareBytes = Tr::kShare * device::kBlockBytes;
  const int rank = static_cast<int>(blockIdx.x) % 2;
  const auto boxes = static_cast<int>(min(ceil_div(max(sizes.inner - work.row, int64_t{0}), 64), int64_t{2}));
  const auto present = static_cast<int>(min(sizes.rows - work.column, int64_t{Tr::kColumns}));
  const auto bytes = static_cast<uint32_t>(boxes * 2 * kBoxBytes + present * device::kBlockBytes);
  device::fill_ring<Shape>(
      shared.ring, place, work.count, bytes,
      [&](uint8_t* a, uint8_t* b, int block_idx, device::Barrier* full) {
        const int k = (work.first + block_idx) * Shape::kBlockK;
        for (int box = 0; box < boxes; ++box) {
          uint8_t* rows = a + box * 2 * kBoxBytes;
          device::tensor_load_2d(rows, &maps.gate, k, work.row + box * 64, full);
          device::tensor_load_2d(rows + kBoxBytes, &maps.up, k, work.row + box * 64, full);
        }
        const bool whole = present == Tr::kColumns;
        const CUtensorMap* map = whole ? &maps.x.whole : &maps.x.rest;
        if (work.split) {
          device::tensor_load_2d(b, map, k, work.column, full);
          if (whole) {
            device::tensor_load_2d(b + kShareBytes, map, k, work.column + Tr::kShare, full);
          }
        } else if (whole || rank == 0) {
          const int share = whole ? rank : 0;
          device::tensor_load_2d_multicast(b + share * kShareBytes, map, k, work.column + share * Tr::kShare,
                                           full, 3);
        }
      });
}

// A lane's place in 8 rows and 16 columns of a result [rows, inner].
template <typename T>
struct SwapAbPlace {
  int64_t offset;
  int64_t columns;  // from there to the end of the row
  bool aligned;

  __device__ __forceinline__ SwapAbPlace(const Sizes& sizes, int64_t row, int64_t column)
      : offset((row + threadIdx.x % 32 / 4) * sizes.inner + column + neighbour_column()),
        columns(sizes.inner - column - neighbour_column()),
        aligned(sizes.inner % 4 == 0) {}

  // d[2 h + c] is column lane / 4 + 8 h, row 2 (lane % 4) + c, as products leave it; it is transposed in registers.
  // Every lane calls it; those whose row does not exist store nothing.
  __device__ __forceinline__ void store(T* result, bool exists, const float (&d)[4]) const {
    const uint2 pack = neighbours(device::transpose_matrix(device::pack_pair<T>(d[0], d[1])),
                                  device::transpose_matrix(device::pack_pair<T>(d[2], d[3])));
    if (exists) {
      store_neighbours(result + offset, columns, aligned, pack);
    }
  }
};

// Stores a warp's results for kRows rows of x from `row` on and 16 columns from `column` on, straight from registers,
// since the ring leaves no shared memory: g is sum(0 ... kRows / 2 - 1), u the kRows / 2 behind it. Sum 4 j + i is
// number i of the rows from 8 j on, as SwapAbPlace::store() takes it.
template <class Tr, int kRows, class Sum>
__device__ __forceinline__ void store_swap_ab(const SwapAbArguments<typename Tr::T>& arguments, int64_t row,
                                              int64_t column, Sum&& sum) {
  const Sizes& s = arguments.sizes;
  SwapAbPlace<typename Tr::T> place(s, row, column);
  row += threadIdx.x % 32 / 4;
#pragma unroll
  for (int j = 0; j < kRows / 8; ++j) {
    const bool exists = row + j * 8 < s.rows;
    float gate[4], up[4], out[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      gate[i] = sum(4 * j + i);
      up[i] = sum(kRows / 2 + 4 * j + i);
      out[i] = gate[i] * activate<Tr::kActivation>(up[i]);
    }
    place.store(arguments.out, exists, out);
    if constexpr (Tr::kKeepsProducts) {
      place.store(arguments.gate, exists, gate);
      place.store(arguments.up, exists, up);
    }
    place.offset += 8 * s.inner;
  }
}

template <class Tr>
__global__ void __launch_bounds__(Tr::kThreads, 1)
    swap_ab_kernel(const __grid_constant__ SwapAbMaps maps, const device::TileOrder order,
                   const SwapAbArguments<typename Tr::T> arguments) {
#if HTREE_SM90A
  extern __shared__ uint8_t raw[];
  auto& shared = device::align_shared<typename Tr::Shared>(raw);
  if (threadIdx.x == 0) {
    device::prefetch_descriptor(&maps.x.whole);
    device::prefetch_descriptor(&maps.gate);
    device::prefetch_descriptor(&maps.up);
  }
  run_tiles<Tr>(
      shared, order, arguments.split,
      [&](const device::TileWork& work, device::RingPlace<Tr::Shape::kStages>& place) {
        load_swap_ab<Tr>(shared, place, maps, arguments.sizes, work);
      },
      [&](const device::TileWork& work, int warpgroup, int column, const float(&d)[Tr::kColumns]) {
        if (work.split) {
          // The other block's sums are added one by one, since there are no registers for all of them.
          using Halves = device::SumHalves<2, Tr::kColumns>;
          const int rank = static_cast<int>(blockIdx.x) % 2;
          const auto places = receive_sums<Tr, 2>(shared, rank, warpgroup, d);
          const auto sum = [&](int i) {
            const int left = Halves::left(i / 4) + i % 4;
            const float own = rank == 0 ? d[left] : d[left + Halves::kHalf];
            return own + reinterpret_cast<const float*>(places(i / 4))[i % 4];
          };
          store_swap_ab<Tr, Tr::kShare>(arguments, work.column + rank * Tr::kShare, work.row + column, sum);
          return;
        }
        store_swap_ab<Tr, Tr::kColumns>(arguments, work.column, work.row + column,
                                        [&](int i) { return d[i]; });
      });
#else
  __trap();  // no launcher comes here: see has_hopper_kernels()
#endif
}

}  // namespace htree::gated_mlp
