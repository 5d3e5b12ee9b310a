// c = (a b^T) / (s_a s_b) for few rows: b is read once, at the speed of memory, so its rows take the 64-row
// side of the products and the rows of a the n side (16 ... 64 of them, missing ones are zero). A cluster
// owns 64 columns of c; its blocks share out k, so that all multiprocessors pull on memory, exchange
// their sums, and each finishes its share of them.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "device/cluster_memory.cuh"
#include "device/kernel_overlap.cuh"
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
  static constexpr int kMultipliers = 128;  // threads
  static constexpr int kThreads = kMultipliers + 32;
  static constexpr int kShare = kRows / 2 / kParts;  // sums of a thread that its block finishes
  static_assert(kShare * kParts * 2 == kRows);

  struct Shared {
    device::GemmRing<Shape> ring;
    float sums[kParts > 1 ? kParts - 1 : 1][kShare][kMultipliers];  // of the other blocks, by their threads
    float by_row[kRows];                                            // inverse scales
    float by_column[kColumns];
  };
  static constexpr int kSharedBytes = sizeof(Shared) + 1024;  // room to align the base
  static_assert(kSharedBytes <= 232448);
};

// Tensor copies of a [m, k] by boxes of 128 bytes x kRows rows and of b [n, k] by 128 bytes x kColumns rows.
struct GemmStreamMaps {
  CUtensorMap a;
  CUtensorMap b;
};

// Sends every other block of the cluster its share of this thread's sums and returns in `own` the block's
// share of all of them. The loading warps of the cluster go through the same barriers.
template <class Tr>
__device__ __forceinline__ void exchange_sums(typename Tr::Shared& shared, int part,
                                              const float (&sum)[Tr::kRows / 2], float (&own)[Tr::kShare]) {
  device::cluster_wait();  // the other blocks have started
#pragma unroll
  for (int to = 0; to < Tr::kParts; ++to) {
    if (to == part) {
#pragma unroll
      for (int i = 0; i < Tr::kShare; ++i) {
        own[i] = sum[to * Tr::kShare + i];
      }
    } else {
#pragma unroll
      for (int i = 0; i < Tr::kShare; ++i) {
        device::store_to_block(&shared.sums[part < to ? part : part - 1][i][threadIdx.x],
                               static_cast<uint32_t>(to), sum[to * Tr::kShare + i]);
      }
    }
  }
  device::cluster_sync();
#pragma unroll
  for (int other = 0; other < Tr::kParts - 1; ++other) {
#pragma unroll
    for (int i = 0; i < Tr::kShare; ++i) {
      own[i] += shared.sums[other][i][threadIdx.x];
    }
  }
}

template <class Tr>
__global__ void __launch_bounds__(Tr::kThreads, 1)
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
  if (threadIdx.x == 0) {
    device::let_next_kernel_begin();
  }
  device::wait_for_previous_kernels();
  if constexpr (Tr::kParts > 1) {
    device::cluster_arrive();  // waited for before anything is written to another block
  }
  device::RingPlace<Shape::kStages> place;
  if (warp == Tr::kMultipliers / 32) {
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
      device::cluster_sync();
    }
    return;
  }

  // Fetched while the first codes are under way.
  if (threadIdx.x < Tr::kRows) {
    shared.by_row[threadIdx.x] = inverse_scale(p.a_scale, row + threadIdx.x, p.sizes.m);
  }
  if (threadIdx.x < Tr::kColumns) {
    shared.by_column[threadIdx.x] = inverse_scale(p.b_scale, column + threadIdx.x, p.sizes.n);
  }

  float sum[Tr::kRows / 2];
  multiply_promoted_in_turns<Shape>(ring, place, count, 0, sum);
  float own[Tr::kShare];
  if constexpr (Tr::kParts > 1) {
    exchange_sums<Tr>(shared, part, sum, own);
  } else {
    device::named_barrier_sync(1, Tr::kMultipliers);  // the scales are there
#pragma unroll
    for (int i = 0; i < Tr::kShare; ++i) {
      own[i] = sum[i];
    }
  }

  // Sum 4 j + 2 h + i of a thread: column 16 warp + lane / 4 + 8 h, row 8 j + 2 (lane % 4) + i.
#pragma unroll
  for (int at = 0; at < Tr::kShare; ++at) {
    const int place_idx = part * Tr::kShare + at;
    const int c = warp * 16 + lane / 4 + place_idx / 2 % 2 * 8;
    const int r = place_idx / 4 * 8 + 2 * (lane % 4) + place_idx % 2;
    if (row + r < p.sizes.m && column + c < p.sizes.n) {
      const float value = own[at] * joint_factor(shared.by_row[r], shared.by_column[c]);
      p.c[(row + r) * p.sizes.n + column + c] = device::from_acc<typename Tr::Out>(value);
    }
  }
#else
  __trap();  // the launcher does not come here: see gemm_is_compiled_for_hopper()
#endif
}

}  // namespace htree::fp8
