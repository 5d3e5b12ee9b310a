// out = (x Wg^T) * act(x Wu^T) for some hundred rows, by persistent blocks (gated_mlp_tile_block.cuh). As in
// gated_mlp_stream.cuh the weights take the 64-row side of the products, so that a tile has as many rows of x
// as n allows in steps of 16, and few of them are padding. A warpgroup multiplies 64 rows of Wg and the same
// 64 rows of Wu, so a thread ends up with g and u of the same elements. The blocks of a cluster take adjacent
// columns of the output, and each loads half of the rows of x for both. Where the last wave has no more tiles
// than clusters, both blocks take half of the k of one tile and finish half of its rows.
//
// "Row" and "column" of a tile, as gated_mlp_tile_block.cuh counts them, are those of the transposed output.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "device/hopper/gemm_pipeline.cuh"
#include "device/hopper/operand_copy.cuh"
#include "device/hopper/tile_order.cuh"
#include "device/mma.cuh"
#include "device/shared_memory.cuh"
#include "device/sizes.h"
#include "ops/gated_mlp/cuda/activation.cuh"
#include "ops/gated_mlp/cuda/gated_mlp_tile_block.cuh"
#include "ops/gated_mlp/gated_mlp_params.h"

namespace htree::gated_mlp {

// kKeepsProducts: g and u are stored too, for the backward.
template <typename T_, Activation kActivation_, int kRowsOfX_, int kStages_, bool kKeepsProducts_>
struct TurnedTraits : TileBlock<device::GemmShape<T_, 256, kRowsOfX_, kStages_, 2, 2>, 64> {
  static constexpr Activation kActivation = kActivation_;
  static constexpr bool kKeepsProducts = kKeepsProducts_;
  static constexpr int kRows = 128;  // columns of the output
  static constexpr int kColumns = kRowsOfX_;
  static constexpr int kShare = kRowsOfX_ / 2;  // rows of x that a block loads for its cluster
  static_assert(kColumns % 16 == 0);
};

// Descriptors of tensor copies by boxes 128 bytes wide: of x [rows, hidden] x kShare rows, or the rows of the
// last tile that exist (device::OperandMaps says why); of the weights [inner, hidden] x 64 rows.
struct TurnedMaps {
  device::OperandMaps x;
  CUtensorMap gate;
  CUtensorMap up;
};

// The results are [rows, inner]; gate and up are null unless they are kept.
template <typename T>
struct TurnedArguments {
  Sizes sizes;
  device::TileShares shares;
  T* out;
  T* gate;
  T* up;
};

// Copies of rows and of boxes of 64 columns that do not exist are left out, and so are their bytes.
template <class Tr>
__device__ __forceinline__ void load_turned(typename Tr::Shared& shared,
                                            device::RingPlace<Tr::Shape::kStages>& place,
                                            const TurnedMaps& maps, const Sizes& sizes,
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
        if (present == Tr::kColumns && work.shared) {
          device::tensor_load_2d(b, &maps.x.whole, k, work.column, full);
          device::tensor_load_2d(b + kShareBytes, &maps.x.whole, k, work.column + Tr::kShare, full);
        } else if (present == Tr::kColumns) {
          device::tensor_load_2d_multicast(b + rank * kShareBytes, &maps.x.whole, k,
                                           work.column + rank * Tr::kShare, full, 3);
        } else if (work.shared) {
          device::tensor_load_2d(b, &maps.x.rest, k, work.column, full);
        } else if (rank == 0) {
          device::tensor_load_2d_multicast(b, &maps.x.rest, k, work.column, full, 3);
        }
      });
}

// A warp stores value(i) for its accumulators i in [0, kRows / 2): 16 columns of a result [rows, inner] from
// `column` on, kRows rows from `row` on. Accumulator 4 j + 2 h + c is column lane / 4 + 8 h, row 8 j + 2 (lane
// % 4) + c. They are laid out in `staged` as rows of 32 bytes, up to 64 at a time.
template <typename T, int kRows, class Value>
__device__ __forceinline__ void store_turned_tile(uint8_t* staged, T* to, const Sizes& sizes, int64_t row,
                                                  int64_t column, Value&& value) {
  constexpr int kStagedRows = 64;
  static_assert(kRows % 8 == 0);
  const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
  for (int first = 0; first < kRows; first += kStagedRows) {
    constexpr int kPairRows = 16;
    __syncwarp();
#pragma unroll
    for (int pair = 0; pair < kStagedRows / kPairRows; ++pair) {
      if (first + pair * kPairRows >= kRows) {
        break;
      }
      uint32_t packed[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // 8 rows number i / 2, 8 columns number i % 2
        const int at = (first + pair * kPairRows + i / 2 * 8) / 2 + i % 2 * 2;
        packed[i] = at < kRows / 2 ? device::pack_pair<T>(value(at), value(at + 1)) : 0;
      }
      // Lane i gives the address of row i % 8 in the i / 16th 8 rows, at the i / 8 % 2th 8 columns. These
      // change places every four rows, so that the banks of eight rows differ.
      const int staged_row = pair * kPairRows + lane / 16 * 8 + lane % 8;
      const int chunk = (lane / 8 % 2) ^ (lane / 4 % 2);
      device::store_matrices_transposed(device::shared_address(staged) + staged_row * 32 + chunk * 16,
                                        packed);
    }
    __syncwarp();
#pragma unroll 1  // the sums that wait leave no registers for addresses
    for (int pair = 0; pair < kStagedRows / kPairRows; ++pair) {
      const int staged_row = pair * kPairRows + lane / 2;
      const int64_t r = row + first + staged_row;
      const int64_t c = column + lane % 2 * 8;
      if (first + staged_row >= kRows || r >= sizes.rows || c >= sizes.inner) {
        continue;
      }
      const uint8_t* from = staged + staged_row * 32 + ((lane % 2) ^ (staged_row / 4 % 2)) * 16;
      T* destination = to + r * sizes.inner + c;
      if (sizes.inner % 8 == 0) {
        *reinterpret_cast<uint4*>(destination) = *reinterpret_cast<const uint4*>(from);
      } else {
        for (int i = 0; i < 8 && c + i < sizes.inner; ++i) {
          destination[i] = reinterpret_cast<const T*>(from)[i];
        }
      }
    }
  }
}

// Stores a warp's results for kRows rows of x from `row` on and 16 columns from `column` on: g is sum(0 ...
// kRows / 2 - 1), u the kRows / 2 behind it.
template <class Tr, int kRows, class Sum>
__device__ __forceinline__ void store_turned(typename Tr::Shared& shared,
                                             const TurnedArguments<typename Tr::T>& arguments, int64_t row,
                                             int64_t column, Sum&& sum) {
  using T = typename Tr::T;
  constexpr int kUp = kRows / 2;
  uint8_t* staged = shared.out[threadIdx.x / 32 - 4][0];
  const Sizes& s = arguments.sizes;
  if constexpr (Tr::kKeepsProducts) {
    store_turned_tile<T, kRows>(staged, arguments.gate, s, row, column, [&](int i) { return sum(i); });
    store_turned_tile<T, kRows>(staged, arguments.up, s, row, column, [&](int i) { return sum(kUp + i); });
  }
  store_turned_tile<T, kRows>(staged, arguments.out, s, row, column,
                              [&](int i) { return sum(i) * activate<Tr::kActivation>(sum(kUp + i)); });
}

template <class Tr>
__global__ void __launch_bounds__(Tr::kThreads, 1)
    turned_kernel(const __grid_constant__ TurnedMaps maps, const device::TileOrder order,
                  const TurnedArguments<typename Tr::T> arguments) {
#if HTREE_SM90A
  extern __shared__ uint8_t raw[];
  auto& shared = device::align_shared<typename Tr::Shared>(raw);
  if (threadIdx.x == 0) {
    device::prefetch_descriptor(&maps.x.whole);
    device::prefetch_descriptor(&maps.gate);
    device::prefetch_descriptor(&maps.up);
  }
  run_tiles<Tr>(
      shared, order, arguments.shares,
      [&](const device::TileWork& work, device::RingPlace<Tr::Shape::kStages>& place) {
        load_turned<Tr>(shared, place, maps, arguments.sizes, work);
      },
      [&](const device::TileWork& work, int warpgroup, int column, const float(&d)[Tr::kColumns]) {
        if (work.shared) {
          // The other block's sums are added one by one, since there are no registers for all of them.
          using Halves = device::SumHalves<2, Tr::kColumns>;
          const int rank = static_cast<int>(blockIdx.x) % 2;
          const auto places = exchange_sums<Tr, 2>(shared, rank, warpgroup, d);
          const auto sum = [&](int i) {
            const int left = Halves::left(i / 4) + i % 4;
            const float own = rank == 0 ? d[left] : d[left + Halves::kHalf];
            return own + reinterpret_cast<const float*>(places(i / 4))[i % 4];
          };
          store_turned<Tr, Tr::kShare>(shared, arguments, work.column + rank * Tr::kShare, work.row + column,
                                       sum);
        } else {
          store_turned<Tr, Tr::kColumns>(shared, arguments, work.column, work.row + column,
                                         [&](int i) { return d[i]; });
        }
      });
#else
  __trap();  // no launcher comes here: see has_hopper_kernels()
#endif
}

}  // namespace htree::gated_mlp
