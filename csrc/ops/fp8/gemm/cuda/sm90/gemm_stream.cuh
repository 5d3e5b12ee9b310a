// c = (a b^T) / (s_a s_b) for few rows. b is read once, at the speed of memory: swap AB, so its rows are the M = 64
// of the products, and the rows of a the N (those that do not exist are not used). A cluster has 64 columns of c. Its
// blocks split K, so that all multiprocessors load from memory; they reduce their sums over DSMEM, and each finishes
// its share of them.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <type_traits>

#include "device/mma.cuh"
#include "device/numeric.cuh"
#include "device/shared_memory.cuh"
#include "device/sizes.h"
#include "device/sm90/cluster_memory.cuh"
#include "device/sm90/operand_copy.cuh"
#include "device/sm90/pdl.cuh"
#include "ops/fp8/gemm/cuda/gemm_scale.cuh"
#include "ops/fp8/gemm/cuda/sm90/gemm_multiply.cuh"

namespace htree::fp8 {

template <typename Out_, int kRows_, int kStages_, int kParts_>
struct GemmStreamTraits {
  using Out = Out_;
  static constexpr int kRows = kRows_;
  static constexpr int kColumns = 64;
  static constexpr int kParts = kParts_;  // split K: parts of k, one per block of the cluster
  using Shape = device::GemmShape<__nv_fp8_e4m3, kColumns, kRows, kStages_, 1>;
  static constexpr int kConsumers = 128;  // threads of the consumer warps
  static constexpr int kThreads = kConsumers + 32;
  static constexpr int kShare = kRows / 2 / kParts;  // sums of a thread that its block finishes
  static_assert(kShare * kParts * 2 == kRows);

  // Sums are sent in fours where a block finishes that many.
  using Sums = std::conditional_t<kShare % 4 == 0, float4, float>;
  static constexpr int kPacks = kShare * 4 / static_cast<int>(sizeof(Sums));
  // Results of two bytes are stored in packs of 16 bytes where a block finishes eight rows or more.
  static constexpr bool kStaged = sizeof(Out) == 2 && kShare % 4 == 0;
  static constexpr int kPitch = 3;  // packs; odd, so that eight rows of a column of packs lie in all banks

  struct Shared {
    device::GemmRing<Shape> ring;
    Sums sums[kParts > 1 ? kParts - 1 : 1][kParts > 1 ? kPacks : 1][kConsumers];  // from the other blocks
    uint4 results[kStaged ? 4 : 1][kStaged ? 16 * kPitch : 1];  // per warp: 16 rows x 16 columns
    ScaleFactors by_row[kRows];
    ScaleFactors by_column[kColumns];
    device::Barrier sums_arrived;
  };
  static constexpr int kSharedBytes = sizeof(Shared) + device::kSharedAlignment;
  static_assert(kSharedBytes <= device::kHopperSharedBytes);
};

struct GemmStreamMaps {
  device::OperandMaps a;  // [m, k]
  device::OperandMaps b;  // [n, k]
};

__device__ __forceinline__ void copy_sums(float& pack, const float* sums) {
  pack = *sums;
}
__device__ __forceinline__ void copy_sums(float4& pack, const float* sums) {
  pack = make_float4(sums[0], sums[1], sums[2], sums[3]);
}

// Sends every other block of the cluster its share of this thread's sums, and returns in `own` the total of
// this block's share.
template <class Tr>
__device__ __forceinline__ void reduce_sums(typename Tr::Shared& shared, int part,
                                            const float (&sum)[Tr::kRows / 2], float (&own)[Tr::kShare]) {
  using Sums = typename Tr::Sums;
  constexpr int kPerPack = Tr::kShare / Tr::kPacks;
  device::cluster_wait();  // the other blocks have initialised their barriers
#pragma unroll
  for (int to = 0; to < Tr::kParts; ++to) {
    if (to == part) {
#pragma unroll
      for (int i = 0; i < Tr::kShare; ++i) {
        own[i] = sum[to * Tr::kShare + i];
      }
    } else {
#pragma unroll
      for (int i = 0; i < Tr::kPacks; ++i) {
        Sums pack;
        copy_sums(pack, &sum[to * Tr::kShare + i * kPerPack]);
        device::send_to_block(&shared.sums[part < to ? part : part - 1][i][threadIdx.x], &shared.sums_arrived,
                              static_cast<uint32_t>(to), pack);
      }
    }
  }
  device::barrier_wait(&shared.sums_arrived, 0);
#pragma unroll
  for (int other = 0; other < Tr::kParts - 1; ++other) {
#pragma unroll
    for (int i = 0; i < Tr::kPacks; ++i) {
      float pack[kPerPack];
      *reinterpret_cast<Sums*>(pack) = shared.sums[other][i][threadIdx.x];
#pragma unroll
      for (int j = 0; j < kPerPack; ++j) {
        own[i * kPerPack + j] += pack[j];
      }
    }
  }
}

// Stores a warp's results of its 16 columns. Element 4 j + 2 h + i of a thread is row 8 j + 2 (lane % 4) + i,
// column lane / 4 + 8 h.
template <class Tr>
__device__ __forceinline__ void store_packs(uint4* results, const GemmParams<typename Tr::Out>& p,
                                            int64_t row, int64_t column, const float (&d)[Tr::kShare]) {
  const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
  for (int first = 0; first < Tr::kShare; first += 8) {
    constexpr int kLast = Tr::kShare - 2;
    uint32_t packed[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // rows 8 (i / 2) ..., columns number i % 2; repeated at the end
      const int at = first + 2 * i <= kLast ? first + 2 * i : kLast;
      packed[i] = device::pack_pair<typename Tr::Out>(d[at], d[at + 1]);
    }
    __syncwarp();  // the previous 16 rows have been read
    // Lane i gives the address of row i / 16 * 8 + i % 8, columns number i / 8 % 2.
    device::store_matrices_transposed(
        device::shared_address(&results[(lane / 16 * 8 + lane % 8) * Tr::kPitch + lane / 8 % 2]), packed);
    __syncwarp();
    const int in_share = first * 2 + lane / 2;
    const int64_t r = row + in_share;
    const int64_t c = column + lane % 2 * 8;
    if (in_share < Tr::kShare * 2 && r < p.sizes.m && c < p.sizes.n) {
      *reinterpret_cast<uint4*>(p.c + r * p.sizes.n + c) = results[lane / 2 * Tr::kPitch + lane % 2];
    }
  }
}

// One thread calls it: it loads `count` k-blocks from `first` on, of the block's rows of a and columns of b.
template <class Tr>
__device__ __forceinline__ void load_part(device::GemmRing<typename Tr::Shape>& ring,
                                          device::RingPlace<Tr::Shape::kStages>& place,
                                          const GemmStreamMaps& maps, const GemmSizes& sizes, int row,
                                          int column, int first, int count) {
  using Shape = typename Tr::Shape;
  const device::OperandCopy<Tr::kColumns, 1> of_b(maps.b, column, sizes.n);
  const device::OperandCopy<Tr::kRows, 1> of_a(maps.a, row, sizes.m);
  device::fill_ring<Shape>(ring, place, count, of_a.bytes + of_b.bytes,
                           [&](uint8_t* b, uint8_t* a, int block_idx, device::Barrier* full) {
                             const int k = (first + block_idx) * Shape::kBlockK;
                             of_b.start(b, k, full, device::kEvictFirst);
                             of_a.start(a, k, full, device::kEvictLast);
                           });
}

template <class Tr>
__global__ void __launch_bounds__(Tr::kThreads, 1)
    gemm_stream_kernel(const __grid_constant__ GemmStreamMaps maps, const GemmParams<typename Tr::Out> p,
                       const int num_blocks) {
#if HTREE_SM90A
  using Shape = typename Tr::Shape;
  extern __shared__ uint8_t raw[];
  auto& shared = device::align_shared<typename Tr::Shared>(raw);
  auto& ring = shared.ring;
  const int part = static_cast<int>(blockIdx.x) % Tr::kParts;  // the rank, known to be the same in all lanes
  const int first_block = num_blocks * part / Tr::kParts;
  const int count = num_blocks * (part + 1) / Tr::kParts - first_block;
  const int column = static_cast<int>(blockIdx.x) / Tr::kParts * Tr::kColumns;
  const int row = static_cast<int>(blockIdx.y) * Tr::kRows;
  const int warp = device::uniform(static_cast<int>(threadIdx.x / 32));
  const int lane = static_cast<int>(threadIdx.x % 32);
  if (threadIdx.x == 0) {
    device::init_ring(ring);
    if constexpr (Tr::kParts > 1) {
      device::barrier_init(&shared.sums_arrived, 1);
    }
    device::fence_barrier_init();
    if constexpr (Tr::kParts > 1) {
      device::barrier_arrive_expect(&shared.sums_arrived,
                                    (Tr::kParts - 1) * Tr::kShare * Tr::kConsumers * sizeof(float));
    }
  }
  __syncthreads();
  device::pdl_launch_and_wait();
  if constexpr (Tr::kParts > 1) {
    device::cluster_arrive_relaxed();  // the wait comes before anything is written to another block
  }
  device::RingPlace<Shape::kStages> place;
  if (warp == Tr::kConsumers / 32) {
    if (lane == 0) {
      load_part<Tr>(ring, place, maps, p.sizes, row, column, first_block, count);
    }
    __syncwarp();
    if constexpr (Tr::kParts > 1) {
      device::cluster_wait();
    }
    return;
  }

  // Fetched while the first codes are on their way.
  for (int i = static_cast<int>(threadIdx.x); i < Tr::kRows; i += Tr::kConsumers) {
    shared.by_row[i] = split_inverse(fetch_scale(p.a_scale, row + i, p.sizes.m));
  }
  if (threadIdx.x < Tr::kColumns) {
    shared.by_column[threadIdx.x] = split_inverse(fetch_scale(p.b_scale, column + threadIdx.x, p.sizes.n));
  }

  float sum[Tr::kRows / 2];
  multiply_promoted_in_turns<Shape>(ring, place, count, 0, sum);
  device::named_barrier_sync(1, Tr::kConsumers);  // the scales are there
  float own[Tr::kShare];
  if constexpr (Tr::kParts > 1) {
    reduce_sums<Tr>(shared, part, sum, own);
  } else {
#pragma unroll
    for (int i = 0; i < Tr::kShare; ++i) {
      own[i] = sum[i];
    }
  }

  // Sum 4 j + 2 h + i of a thread is column 16 warp + lane / 4 + 8 h, row 8 j + 2 (lane % 4) + i.
  const auto row_of = [&](int at) {
    const int place_idx = part * Tr::kShare + at;
    return place_idx / 4 * 8 + 2 * (lane % 4) + place_idx % 2;
  };
  const auto column_of = [&](int at) { return warp * 16 + lane / 4 + (part * Tr::kShare + at) / 2 % 2 * 8; };
#pragma unroll
  for (int at = 0; at < Tr::kShare; ++at) {
    const ScaleFactors by = joint_factors(shared.by_row[row_of(at)], shared.by_column[column_of(at)]);
    own[at] = own[at] * by.first * by.second;
  }
  if constexpr (Tr::kStaged) {
    if (p.sizes.n % 8 == 0) {
      store_packs<Tr>(shared.results[warp], p, row + part * Tr::kShare * 2, column + warp * 16, own);
      return;
    }
  }
#pragma unroll
  for (int at = 0; at < Tr::kShare; ++at) {
    const int64_t r = row + row_of(at);
    const int64_t c = column + column_of(at);
    if (r < p.sizes.m && c < p.sizes.n) {
      p.c[r * p.sizes.n + c] = device::from_acc<typename Tr::Out>(own[at]);
    }
  }
#else
  __trap();  // no launcher comes here: see has_hopper_kernels()
#endif
}

}  // namespace htree::fp8
