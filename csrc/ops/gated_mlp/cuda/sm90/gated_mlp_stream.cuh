// out = (x Wg^T) * act(x Wu^T) for few rows. The weights are read once, at the speed of memory: swap AB, so they are
// the M = 64 of the products, and the rows of x the N (16, 32 or 64 of them; missing ones are
// zero). A block has 64 columns of the output. One warpgroup multiplies rows of Wg, the other rows of Wu.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "device/mma.cuh"
#include "device/shared_memory.cuh"
#include "device/sizes.h"
#include "device/sm90/gemm_pipeline.cuh"
#include "ops/gated_mlp/cuda/activation.cuh"
#include "ops/gated_mlp/gated_mlp_params.h"

namespace htree::gated_mlp {

template <typename T_, Activation kActivation_, int kRows_, int kStages_>
struct StreamTraits {
  using T = T_;
  static constexpr Activation kActivation = kActivation_;
  static constexpr int kRows = kRows_;  // rows of x
  static constexpr int kColumns = 64;   // columns of the output per block
  using Shape = device::GemmShape<T, 2 * kColumns, kRows, kStages_, 1>;
  static constexpr int kThreads = 256 + 32;
  static_assert(kRows % 16 == 0);

  struct Shared {
    device::GemmRing<Shape> ring;
  };
  static constexpr int kSharedBytes = sizeof(Shared) + device::kSharedAlignment;
  static_assert(kSharedBytes <= device::kHopperSharedBytes);
  // This memory is used again after the last product: for act(u), which one warpgroup gives the other, then
  // for the output tile.
  static constexpr int kExchangeBytes = 128 * (kRows / 2) * 4;
  static_assert(kExchangeBytes + kRows * kColumns * 2 <= sizeof(Shared));
};

// Descriptors of tensor copies: of x by boxes of 128 bytes x kRows rows, of the weights by boxes of 128 bytes
// x 64 rows.
struct StreamMaps {
  CUtensorMap x;
  CUtensorMap gate;
  CUtensorMap up;
};

template <class Tr>
__device__ __forceinline__ void load_stream(typename Tr::Shared& shared, const StreamMaps& maps,
                                            int num_blocks) {
  using Shape = typename Tr::Shape;
  const int column = static_cast<int>(blockIdx.x) * Tr::kColumns;
  const int row = static_cast<int>(blockIdx.y) * Tr::kRows;
  device::RingPlace<Shape::kStages> place;
  device::fill_ring<Shape>(
      shared.ring, place, num_blocks, [&](uint8_t* a, uint8_t* b, int block_idx, device::Barrier* full) {
        const int k = block_idx * Shape::kBlockK;
        device::tensor_load_2d(a, &maps.gate, k, column, full, device::kEvictFirst);
        device::tensor_load_2d(a + 64 * device::kBlockBytes, &maps.up, k, column, full, device::kEvictFirst);
        device::tensor_load_2d(b, &maps.x, k, row, full, device::kEvictLast);
      });
}

template <class Tr>
__global__ void __launch_bounds__(Tr::kThreads)
    stream_kernel(const __grid_constant__ StreamMaps maps, typename Tr::T* __restrict__ out,  // [rows, inner]
                  const Sizes sizes, const int num_blocks) {
#if HTREE_SM90A
  using T = typename Tr::T;
  using Shape = typename Tr::Shape;
  constexpr int kHeld = Tr::kRows / 2;  // accumulators per thread
  extern __shared__ uint8_t raw[];
  auto& shared = device::align_shared<typename Tr::Shared>(raw);
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int lane = static_cast<int>(threadIdx.x % 32);

  if (threadIdx.x == 0) {
    device::init_ring(shared.ring);
    device::fence_barrier_init();
  }
  __syncthreads();
  if (warp == 8) {
    if (lane == 0) {
      load_stream<Tr>(shared, maps, num_blocks);
    }
    return;
  }

  const int warpgroup = warp / 4;  // 0 multiplies Wg, 1 Wu
  device::RingPlace<Shape::kStages> place;
  float d[kHeld];
  device::multiply_ring<Shape>(shared.ring, place, num_blocks, warpgroup, d);

  // d[4 j + 2 h + c] is column 16 (warp % 4) + lane / 4 + 8 h of the block, row 8 j + 2 (lane % 4) + c of x.
  float* exchange = reinterpret_cast<float*>(&shared);  // [kHeld][128]
  uint8_t* staged = reinterpret_cast<uint8_t*>(&shared) + Tr::kExchangeBytes;
  device::named_barrier_sync(1, 256);  // both warpgroups are done with the ring
  const int thread = static_cast<int>(threadIdx.x % 128);
  if (warpgroup == 1) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      exchange[i * 128 + thread] = activate<Tr::kActivation>(d[i]);
    }
  }
  device::named_barrier_sync(1, 256);
  if (warpgroup == 0) {
#pragma unroll
    for (int pair = 0; pair < Tr::kRows / 16; ++pair) {
      uint32_t packed[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = pair * 8 + (i / 2) * 4 + (i % 2) * 2;
        packed[i] = device::pack_pair<T>(d[at] * exchange[at * 128 + thread],
                                         d[at + 1] * exchange[(at + 1) * 128 + thread]);
      }
      // Lane i gives the address of row i % 8 in the i / 16th 8 rows of x, at the i / 8 % 2th 8
      // columns of the warp.
      const int row = pair * 16 + lane / 16 * 8 + lane % 8;
      const int chunk = (2 * warp + lane / 8 % 2) ^ (lane % 8);
      device::store_matrices_transposed(device::shared_address(staged) + row * 128 + chunk * 16, packed);
    }
  }
  device::named_barrier_sync(1, 256);

  const int64_t first_row = int64_t{blockIdx.y} * Tr::kRows;
  const int first_column = static_cast<int>(blockIdx.x) * Tr::kColumns;
  for (int i = static_cast<int>(threadIdx.x); i < Tr::kRows * 8; i += 256) {
    const int row = i / 8;
    const int column = first_column + i % 8 * 8;
    if (first_row + row >= sizes.rows || column >= sizes.inner) {
      continue;
    }
    const uint8_t* from = staged + row * 128 + ((i % 8) ^ (row % 8)) * 16;
    T* to = out + (first_row + row) * sizes.inner + column;
    if (sizes.inner % 8 == 0) {
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    } else {
      for (int c = 0; c < 8 && column + c < sizes.inner; ++c) {
        to[c] = reinterpret_cast<const T*>(from)[c];
      }
    }
  }
#else
  __trap();  // no launcher comes here: see has_hopper_kernels()
#endif
}

}  // namespace htree::gated_mlp
