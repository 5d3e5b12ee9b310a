// c = (a b^T) / (s_a s_b) for few rows: b is read once, at the speed of memory, so its rows take the 64-row
// side of the products and the rows of a the n side (16 ... 64 of them, missing ones are zero). A cluster
// owns 64 columns of c; its blocks share out k, so that all multiprocessors pull on memory, and the first of
// them adds the parts.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "device/cluster_memory.cuh"
#include "device/numeric.cuh"
#include "ops/fp8/gemm/gemm_multiply.cuh"

namespace htree::fp8 {

template <typename Out_, int kRows_, int kStages_, int kParts_>
struct GemmStreamTraits {
  using Out = Out_;
  static constexpr int kRows = kRows_;
  static constexpr int kColumns = 64;
  static constexpr int kParts = kParts_;  // of k, one per block of the cluster
  using Shape = device::GemmShape<__nv_fp8_e4m3, kColumns, kRows, kStages_, 1>;
  static constexpr int kThreads = 128 + 32;

  struct Shared {
    device::GemmRing<Shape> ring;
    float sums[kParts > 1 ? kParts - 1 : 1][kRows / 2][128];  // of the other blocks, by their threads
  };
  static constexpr int kSharedBytes = sizeof(Shared) + 1024;  // room to align the base
};

// Tensor copies of a [m, k] by boxes of 128 bytes x kRows rows and of b [n, k] by 128 bytes x 64 rows.
struct GemmStreamMaps {
  CUtensorMap a;
  CUtensorMap b;
};

template <class Tr>
__global__ void __launch_bounds__(Tr::kThreads)
    gemm_stream_kernel(const __grid_constant__ GemmStreamMaps maps, const GemmParams<typename Tr::Out> p,
                       const int num_blocks) {
#if HTREE_SM90A
  using Shape = typename Tr::Shape;
  extern __shared__ uint8_t raw[];
  auto& shared = *reinterpret_cast<typename Tr::Shared*>((reinterpret_cast<uintptr_t>(raw) + 1023) &
                                                         ~static_cast<uintptr_t>(1023));
  auto& ring = shared.ring;
  const int part = Tr::kParts > 1 ? static_cast<int>(device::cluster_block_rank()) : 0;
  const int first_block = num_blocks * part / Tr::kParts;
  const int count = num_blocks * (part + 1) / Tr::kParts - first_block;
  const int column = static_cast<int>(blockIdx.x) / Tr::kParts * Tr::kColumns;
  const int row = static_cast<int>(blockIdx.y) * Tr::kRows;
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int lane = static_cast<int>(threadIdx.x % 32);
  if (threadIdx.x == 0) {
    device::init_ring(ring);
    device::fence_barrier_init();
  }
  __syncthreads();
  if constexpr (Tr::kParts > 1) {
    device::cluster_arrive();  // waited for before anything is written to another block
  }
  device::RingPlace<Shape::kStages> place;
  if (warp == 4) {
    if (lane == 0) {
      device::fill_ring<Shape>(ring, place, count,
                               [&](uint8_t* b, uint8_t* a, int block_idx, device::Barrier* full) {
                                 const int k = (first_block + block_idx) * Shape::kBlockK;
                                 device::tensor_load_2d(b, &maps.b, k, column, full, device::kEvictFirst);
                                 device::tensor_load_2d(a, &maps.a, k, row, full, device::kEvictLast);
                               });
    }
    __syncwarp();
    if constexpr (Tr::kParts > 1) {
      device::cluster_wait();
      device::cluster_arrive();
    }
    return;
  }

  float sum[1][Tr::kRows / 2];
  multiply_promoted<Shape, 128, 1>(ring, place, count, 0, sum);
  if constexpr (Tr::kParts > 1) {
    device::cluster_wait();
    if (part > 0) {
#pragma unroll
      for (int i = 0; i < Tr::kRows / 2; ++i) {
        device::store_to_block(&shared.sums[part - 1][i][threadIdx.x], 0, sum[0][i]);
      }
    }
    device::cluster_arrive();
    if (part > 0) {
      return;
    }
    device::cluster_wait();
#pragma unroll
    for (int other = 0; other < Tr::kParts - 1; ++other) {
#pragma unroll
      for (int i = 0; i < Tr::kRows / 2; ++i) {
        sum[0][i] += shared.sums[other][i][threadIdx.x];
      }
    }
  }

  // Places 4 j + 2 h + i: column 16 warp + lane / 4 + 8 h, row 8 j + 2 (lane % 4) + i.
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int64_t c = column + warp * 16 + lane / 4 + 8 * h;
    if (c >= p.sizes.n) {
      continue;
    }
    const float by_column = inverse_scale(p.b_scale, c, p.sizes.n);
#pragma unroll
    for (int j = 0; j < Tr::kRows / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int64_t r = row + 8 * j + 2 * (lane % 4) + i;
        if (r < p.sizes.m) {
          const float factor = joint_factor(inverse_scale(p.a_scale, r, p.sizes.m), by_column);
          p.c[r * p.sizes.n + c] = device::from_acc<typename Tr::Out>(sum[0][4 * j + 2 * h + i] * factor);
        }
      }
    }
  }
#else
  __trap();  // the launcher does not come here: see gemm_is_compiled_for_hopper()
#endif
}

}  // namespace htree::fp8
