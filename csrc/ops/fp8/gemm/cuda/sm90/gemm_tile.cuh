// c = (a b^T) / (s_a s_b) by persistent blocks, with one producer warpgroup and one to three consumers. A
// tile is kRows rows of a against kColumns rows of b.
//
// In a cluster of kCluster, the blocks take neighbouring columns of one row tile, and each loads its share of
// the rows of a for all. Without clusters, two row tiles of few rows, with swap AB, would bring the same
// columns of b at the same time, which is half of what comes from memory. In a pair (kParts = 2), each block
// takes tiles of its own; but where the last wave has no more tiles than pairs, it is a stream-K tail: a tile is split
// along K over both blocks, and each finishes half of it.
//
// A product has M = 64 and N any multiple of 8. A swap-AB kernel is launched with a and b swapped; it computes the
// transpose of c and stores it as c, so that the number of rows of c can be any multiple of 8. What decides is how
// many waves the tiles make over the multiprocessors.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <type_traits>

#include "device/shared_memory.cuh"
#include "device/sizes.h"
#include "device/sm90/operand_copy.cuh"
#include "device/sm90/pdl.cuh"
#include "device/sm90/tile_order.cuh"
#include "ops/fp8/gemm/cuda/gemm_scale.cuh"
#include "ops/fp8/gemm/cuda/sm90/gemm_multiply.cuh"
#include "ops/fp8/gemm/cuda/sm90/gemm_store.cuh"
#include "ops/fp8/gemm/cuda/sm90/gemm_tile_epilogue.cuh"

namespace htree::fp8 {

template <typename Out_, int kWarpgroups_, int kRows_, int kColumns_, int kStages_, int kPromoteK_,
          int kCluster_, int kParts_ = 1, bool kSwapsAb_ = false>
struct GemmTileTraits {
  using Out = Out_;
  static constexpr int kRows = kRows_;
  static constexpr int kColumns = kColumns_;
  static constexpr int kPromoteK = kPromoteK_;
  static constexpr int kCluster = kCluster_;
  static constexpr int kParts = kParts_;
  static constexpr bool kSwapsAb = kSwapsAb_;
  static_assert(kParts == 1 || (kParts == 2 && kCluster == 1 && kRows_ == 64 * kWarpgroups_ && !kSwapsAb));
  static constexpr int kBlocksPerCluster = kCluster * kParts;
  static constexpr int kWarpgroups = kWarpgroups_;          // consumer warpgroups
  static constexpr int kHalves = kRows / 64 / kWarpgroups;  // parts of 64 rows of a warpgroup
  static_assert(kHalves * kWarpgroups * 64 == kRows);
  static constexpr int kThreads = 128 * (1 + kWarpgroups);
  static constexpr bool kShiftsRegisters = kWarpgroups > 1;
  static constexpr int kProducerRegisters = kWarpgroups == 3 ? 32 : kParts == 1 ? 24 : 40;
  static constexpr int kConsumerRegisters = kWarpgroups == 3 ? 152 : kParts == 1 ? 240 : 232;
  static_assert(!kShiftsRegisters || (kProducerRegisters + kWarpgroups * kConsumerRegisters) * 128 <= 65536);
  // Two sets of accumulators, where a warpgroup has the registers for them and for the sums.
  static constexpr bool kInTurns =
      kHalves == 1 && kWarpgroups <= 2 && kPromoteK == device::kBlockBytes && kColumns <= 152;
  using Shape = device::GemmShape<__nv_fp8_e4m3, kRows, kColumns, kStages_, kCluster, kWarpgroups>;

  struct Small : DsmemReductions<kParts == 1 ? 0 : kWarpgroups> {
    ColumnFactors<kColumns> by_column[kWarpgroups][2];  // for two tiles, one after the other
  };
  static constexpr int kMostSharedBytes =
      device::kHopperSharedBytes - device::kSharedAlignment;  // less what aligning the base may cost
  static constexpr int kSharedBesideStore = static_cast<int>(sizeof(device::GemmRing<Shape>) + sizeof(Small));
  static constexpr int kStoreBytes = (kMostSharedBytes - kSharedBesideStore) / (4 * kWarpgroups);  // per warp
  // Of a split tile a block finishes the left or the right half of the columns.
  static constexpr int kOwnColumns = kColumns / kParts;
  static constexpr int kShare = kOwnColumns / 2;  // sums of a thread that its block finishes
  using Store = std::conditional_t<kSwapsAb, GemmSwapAbStore<Out, kColumns, 4 * kStoreBytes>,
                                   GemmStore<Out, kColumns, kStoreBytes, kOwnColumns>>;
  using OwnStore = std::conditional_t<kParts == 1, Store, GemmStore<Out, kOwnColumns, kStoreBytes>>;

  // A warp's place for its results, and before that for the sums from the other block. With swap AB it belongs
  // to a warpgroup.
  union Stage {
    typename Store::Shared results;
    typename OwnStore::Shared own;
    float4 sums[kParts > 1 ? kShare / 4 : 1][32];
  };
  static constexpr int kStagesPerWarpgroup = kSwapsAb ? 1 : 4;

  struct Shared {
    device::GemmRing<Shape> ring;
    Stage store[kWarpgroups * kStagesPerWarpgroup];
    Small small;
  };
  static constexpr int kSharedBytes = sizeof(Shared) + device::kSharedAlignment;
  static_assert(kSharedBytes <= device::kHopperSharedBytes);
};

struct GemmTileMaps {
  device::OperandMaps a;  // [m, k]
  device::OperandMaps b;  // [n, k]
  CUtensorMap c;          // boxes of Tr::Store; unused where `copies_c` is false
};

// Calls visit for the block's tiles, one after the other.
template <class Tr, class Visit>
__device__ __forceinline__ void for_tiles(const device::TileOrder& order, const device::SplitTiles& split,
                                          Visit&& visit) {
  const int rank = static_cast<int>(blockIdx.x) % Tr::kBlocksPerCluster;  // known to be the same in all lanes
  const int cluster = static_cast<int>(blockIdx.x) / Tr::kBlocksPerCluster;
  device::TileWork work{0, 0, 0, split.num_blocks, false};
  if constexpr (Tr::kParts == 1) {
    for (int tile = cluster; tile < order.count(); tile += gridDim.x / Tr::kCluster) {
      order.place(tile, work.row, work.column);
      work.column = work.column * Tr::kCluster + rank;
      visit(work);
    }
  } else {
    for (int wave = 0; wave < order.count(); wave += gridDim.x) {
      int tile = wave + static_cast<int>(blockIdx.x);
      if (wave == split.first_split) {
        tile = wave + cluster;
        work.take_half(split, rank);
      }
      if (tile < order.count()) {
        order.place(tile, work.row, work.column);
        visit(work);
      }
    }
  }
}

template <class Tr>
__device__ __forceinline__ void load_tiles(typename Tr::Shared& shared, const GemmTileMaps& maps,
                                           const device::TileOrder& order,
                                           const GemmTileArguments<typename Tr::Out>& p) {
  using Shape = typename Tr::Shape;
  device::RingPlace<Shape::kStages> place;
  for_tiles<Tr>(order, p.split, [&](const device::TileWork& work) {
    const device::OperandCopy<Tr::kRows, Tr::kCluster> of_a(maps.a, int64_t{work.row} * Tr::kRows, p.sizes.m);
    const device::OperandCopy<Tr::kColumns, 1> of_b(maps.b, int64_t{work.column} * Tr::kColumns, p.sizes.n);
    device::fill_ring<Shape>(shared.ring, place, work.count, of_a.bytes + of_b.bytes,
                             [&](uint8_t* a, uint8_t* b, int block_idx, device::Barrier* full) {
                               const int k = (work.first + block_idx) * Shape::kBlockK;
                               of_a.start(a, k, full);
                               of_b.start(b, k, full);
                             });
  });
}

// What a warpgroup does for a tile that has none of its rows.
template <class Shape>
__device__ __forceinline__ void skip_blocks(device::GemmRing<Shape>& ring,
                                            device::RingPlace<Shape::kStages>& place, int num_blocks) {
  for (int block_idx = 0; block_idx < num_blocks; ++block_idx) {
    device::barrier_wait(&ring.full[place.stage], place.parity);
    device::release_stage(ring, place.stage);
    place.advance();
  }
}

// A warpgroup scales and stores its sums of a tile. The tile's columns begin at `column`, the warpgroup's
// rows at `group_row`.
template <class Tr>
__device__ __forceinline__ void run_epilogue(typename Tr::Shared& shared, const device::TileWork& work,
                                             const GemmTileArguments<typename Tr::Out>& p,
                                             const CUtensorMap& map_c, int warpgroup, int group_row,
                                             int column, const ScaleFactors (&by_row)[2 * Tr::kHalves],
                                             const ColumnFactors<Tr::kColumns>* by_column, bool has_second,
                                             float (&sum)[Tr::kHalves][Tr::kColumns / 2]) {
  const int warp_in_group = static_cast<int>(threadIdx.x / 32 % 4);
  const int first_row = group_row + warp_in_group * 16;
  if constexpr (Tr::kSwapsAb) {
    apply_scales<Tr::kColumns>(by_row[0], by_row[1], by_column, has_second, 0, sum[0]);
    store_columns<typename Tr::Store, Tr::kColumns>(shared.store[warpgroup].results, map_c, p, column,
                                                    group_row, 1 + warpgroup, sum[0]);
  } else {
    auto& stage = shared.store[warpgroup * 4 + warp_in_group];
    if constexpr (Tr::kParts > 1) {
      if (work.split) {
        const int rank = static_cast<int>(blockIdx.x) % 2;
        const int from = rank * Tr::kOwnColumns;
        float own[Tr::kShare];
        reduce_sums<Tr>(shared, rank, warpgroup, sum[0], own);
        apply_scales<Tr::kOwnColumns>(by_row[0], by_row[1], by_column, has_second, from, own);
        store_rows<typename Tr::OwnStore, Tr::kOwnColumns>(stage.own, map_c, p, first_row, column + from,
                                                           own);
        return;
      }
    }
#pragma unroll
    for (int half = 0; half < Tr::kHalves; ++half) {
      apply_scales<Tr::kColumns>(by_row[2 * half], by_row[2 * half + 1], by_column, has_second, 0, sum[half]);
      store_rows<typename Tr::Store, Tr::kColumns>(stage.results, map_c, p, first_row + half * 64, column,
                                                   sum[half]);
    }
  }
}

template <class Tr>
__device__ __forceinline__ void multiply_tiles(typename Tr::Shared& shared, const device::TileOrder& order,
                                               const GemmTileArguments<typename Tr::Out>& p,
                                               const CUtensorMap& map_c, int warpgroup) {
  using Shape = typename Tr::Shape;
  const int warp_in_group = static_cast<int>(threadIdx.x / 32 % 4);
  const int thread = static_cast<int>(threadIdx.x % 128);
  const int lane = thread % 32;
  // A single scale for all of c is known from the start.
  const bool single = p.a_scale.stride == 0 && p.b_scale.stride == 0;
  const ScaleFactors by_all = joint_factors(split_inverse(*p.a_scale.data), split_inverse(*p.b_scale.data));
  device::RingPlace<Shape::kStages> place;
  int slot = 0;
  for_tiles<Tr>(order, p.split, [&](const device::TileWork& work) {
    const int column = work.column * Tr::kColumns;
    const int group_row = work.row * Tr::kRows + warpgroup * Tr::kHalves * 64;
    if (group_row >= p.sizes.m) {
      skip_blocks(shared.ring, place, work.count);
      return;
    }
    if constexpr (Tr::kParts > 1) {
      if (work.split) {
        expect_sums<Tr>(shared, warpgroup);
      }
    }
    const int first_row = group_row + warp_in_group * 16;
    // The scales are fetched before the products, which hide their latency, and are used after them.
    constexpr int kColumnsOfThread = (Tr::kColumns + 127) / 128;
    float row_scale[2 * Tr::kHalves] = {};
    float column_scale[kColumnsOfThread] = {};
    if (!single) {
#pragma unroll
      for (int i = 0; i < 2 * Tr::kHalves; ++i) {
        row_scale[i] = fetch_scale(p.a_scale, first_row + i / 2 * 64 + i % 2 * 8 + lane / 4, p.sizes.m);
      }
#pragma unroll
      for (int i = 0; i < kColumnsOfThread; ++i) {
        column_scale[i] = fetch_scale(p.b_scale, column + thread + 128 * i, p.sizes.n);
      }
    }

    float sum[Tr::kHalves][Tr::kColumns / 2];
    if constexpr (Tr::kInTurns) {
      multiply_promoted_in_turns<Shape>(shared.ring, place, work.count, warpgroup, sum[0]);
    } else {
      multiply_promoted<Shape, Tr::kPromoteK, Tr::kHalves>(shared.ring, place, work.count, warpgroup, sum);
    }

    ScaleFactors by_row[2 * Tr::kHalves];
    const ColumnFactors<Tr::kColumns>* by_column = nullptr;
    bool has_second = by_all.second != 1.0f;
    if (single) {
#pragma unroll
      for (int i = 0; i < 2 * Tr::kHalves; ++i) {
        by_row[i] = by_all;
      }
    } else {
      has_second = false;
      // Two places, one after the other. A thread that writes one has passed the barrier of the tile before,
      // after which no thread reads this place.
      ColumnFactors<Tr::kColumns>& slot_factors = shared.small.by_column[warpgroup][slot];
#pragma unroll
      for (int i = 0; i < kColumnsOfThread; ++i) {
        const int at = thread + 128 * i;
        if (at < Tr::kColumns) {
          const ScaleFactors factors = split_inverse(column_scale[i]);
          slot_factors.first[at] = factors.first;
          slot_factors.second[at] = factors.second;
          has_second |= factors.second != 1.0f;
        }
      }
#pragma unroll
      for (int i = 0; i < 2 * Tr::kHalves; ++i) {
        by_row[i] = split_inverse(row_scale[i]);
        has_second |= by_row[i].second != 1.0f;
      }
      by_column = &slot_factors;
      slot ^= 1;
      has_second = device::named_barrier_any(1 + warpgroup, 128, has_second);
    }
    run_epilogue<Tr>(shared, work, p, map_c, warpgroup, group_row, column, by_row, by_column, has_second,
                     sum);
  });
  if (lane == 0) {
    Tr::Store::finish();
  }
  __syncwarp();
}

template <class Tr>
__global__ void __launch_bounds__(Tr::kThreads, 1)
    gemm_tile_kernel(const __grid_constant__ GemmTileMaps maps, const device::TileOrder order,
                     const GemmTileArguments<typename Tr::Out> p) {
#if HTREE_SM90A
  extern __shared__ uint8_t raw[];
  auto& shared = device::align_shared<typename Tr::Shared>(raw);
  if (threadIdx.x == 0) {
    device::init_ring(shared.ring);
    if constexpr (Tr::kParts > 1) {
      for (int i = 0; i < Tr::kWarpgroups; ++i) {
        device::init_reduction(shared.small.reduction[i]);
      }
    }
    device::fence_barrier_init();
    device::prefetch_descriptor(&maps.a.whole);
    device::prefetch_descriptor(&maps.b.whole);
    if (p.copies_c) {
      device::prefetch_descriptor(&maps.c);
    }
  }
  if constexpr (Tr::kCluster > 1) {
    device::cluster_sync();
  } else {
    __syncthreads();
  }
  if constexpr (Tr::kParts > 1) {
    device::cluster_arrive_relaxed();
  }
  device::pdl_launch_and_wait();
  if constexpr (Tr::kParts > 1) {
    // The other block has initialised its barriers. All warps wait here together, because racecheck
    // reports it where one of them passes before all have come, even a producer that still waits for
    // the consumer warps.
    device::cluster_wait();
  }
  const int group = device::uniform(static_cast<int>(threadIdx.x / 128));
  if (group == 0) {
    if constexpr (Tr::kShiftsRegisters) {
      device::lower_registers<Tr::kProducerRegisters>();
    }
    if (threadIdx.x == 0) {
      load_tiles<Tr>(shared, maps, order, p);
    }
    __syncwarp();
  } else {
    if constexpr (Tr::kShiftsRegisters) {
      device::raise_registers<Tr::kConsumerRegisters>();
    }
    multiply_tiles<Tr>(shared, order, p, maps.c, group - 1);
  }
  if constexpr (Tr::kCluster > 1) {
    device::cluster_sync();  // no block leaves while another may still signal its barriers
  }
#else
  __trap();  // no launcher comes here: see has_hopper_kernels()
#endif
}

}  // namespace htree::fp8
