// The epilogue of gemm_tile_kernel: what its consumer warps do with their sums. They reduce them over DSMEM where a tile
// is split along K, scale them and store them.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "device/sm90/cluster_memory.cuh"
#include "device/sm90/dsmem_reduction.cuh"
#include "device/sm90/mbarrier.cuh"
#include "device/sm90/tile_order.cuh"
#include "device/sm90/tma.cuh"
#include "ops/fp8/gemm/cuda/gemm_scale.cuh"
#include "ops/fp8/gemm/gemm_params.h"

namespace htree::fp8 {

template <typename Out>
struct GemmTileArguments {
  GemmSizes sizes;
  GemmScale a_scale;
  GemmScale b_scale;
  Out* c;  // [m, n], contiguous; with swap AB [n, m]
  device::SplitTiles split;
  bool copies_c;  // whether its rows are aligned to 16 bytes
};

// The inverse scales of a tile's columns.
template <int kColumns>
struct ColumnFactors {
  float first[kColumns];
  float second[kColumns];
};

// A warp scales its 16 rows. `by_column` points to the factors of the columns; it is null where the factors
// of the rows include them.
template <int kColumns>
__device__ __forceinline__ void scale_rows(float by_upper_row, float by_lower_row, const float* by_column,
                                           float (&d)[kColumns / 2]) {
  if (by_column == nullptr) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      d[i] *= i / 2 % 2 == 0 ? by_upper_row : by_lower_row;
    }
    return;
  }
  const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) {
    const float2 two = *reinterpret_cast<const float2*>(by_column + 8 * j + 2 * (lane % 4));
    d[4 * j] *= joint_factor(by_upper_row, two.x);
    d[4 * j + 1] *= joint_factor(by_upper_row, two.y);
    d[4 * j + 2] *= joint_factor(by_lower_row, two.x);
    d[4 * j + 3] *= joint_factor(by_lower_row, two.y);
  }
}

template <int kCount>
struct DsmemReductions {
  device::DsmemReduction reduction[kCount];
};
template <>
struct DsmemReductions<0> {};

// A warp calls it before the products of a split tile: the other block may then send its sums.
template <class Tr>
__device__ __forceinline__ void expect_sums(typename Tr::Shared& shared, int warpgroup) {
  if (threadIdx.x % 32 == 0) {
    device::wait_stores_read<0>();
    device::expect_sums(shared.small.reduction[warpgroup], 32 * Tr::kShare * sizeof(float),
                        device::cluster_block_rank() ^ 1);
  }
  __syncwarp();
}

// Sends the other block of the cluster its half of this thread's sums, and returns in `own` the total
// of this block's half.
template <class Tr>
__device__ __forceinline__ void reduce_sums(typename Tr::Shared& shared, int rank, int warpgroup,
                                            const float (&sum)[Tr::kColumns / 2], float (&own)[Tr::kShare]) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  auto& sums = shared.store[warpgroup * 4 + threadIdx.x / 32 % 4].sums;
  const auto place = [&](int pack) { return &sums[pack][lane]; };
  device::send_and_await_halves<1>(shared.small.reduction[warpgroup], rank, place, sum);
#pragma unroll
  for (int i = 0; i < Tr::kShare; ++i) {
    own[i] = rank == 0 ? sum[i] : sum[Tr::kShare + i];
  }
#pragma unroll
  for (int i = 0; i < Tr::kShare; i += 4) {
    const float4 pack = *place(i / 4);
    own[i] += pack.x;
    own[i + 1] += pack.y;
    own[i + 2] += pack.z;
    own[i + 3] += pack.w;
  }
  __syncwarp();  // the results go to the same place
}

// Scales a warp's 16 rows, kOwn columns from column `from` of the tile on.
template <int kOwn, int kColumns>
__device__ __forceinline__ void apply_scales(const ScaleFactors& upper, const ScaleFactors& lower,
                                             const ColumnFactors<kColumns>* by_column, bool has_second,
                                             int from, float (&d)[kOwn / 2]) {
  scale_rows<kOwn>(upper.first, lower.first, by_column == nullptr ? nullptr : by_column->first + from, d);
  if (has_second) {
    scale_rows<kOwn>(upper.second, lower.second, by_column == nullptr ? nullptr : by_column->second + from,
                     d);
  }
}

// A warp stores its 16 rows of c.
template <class Store, int kOwn, typename Out>
__device__ __forceinline__ void store_rows(typename Store::Shared& stage, const CUtensorMap& map_c,
                                           const GemmTileArguments<Out>& p, int row, int column,
                                           const float (&d)[kOwn / 2]) {
  if (p.copies_c) {
    Store::rows(stage, &map_c, row, column, d);
  } else {
    Store::pairs(p.c, p.sizes, row, column, d);
  }
}

// A warpgroup of a swap-AB kernel stores its 64 columns of c.
template <class Store, int kRows, typename Out>
__device__ __forceinline__ void store_columns(typename Store::Shared& stage, const CUtensorMap& map_c,
                                              const GemmTileArguments<Out>& p, int row, int column,
                                              int barrier, const float (&d)[kRows / 2]) {
  if (p.copies_c) {
    Store::tile(stage, &map_c, row, column, barrier, d);
  } else {
    Store::elements(p.c, p.sizes.n, p.sizes.m, row, column, d);
  }
}

}  // namespace htree::fp8
