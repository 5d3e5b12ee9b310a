// The largest finite magnitudes of groups along rows that no block holds in registers, and of whole tensors.
// Each group is split over blocks, which leave partial maxima [num_splits, num_scales] as bits.
#pragma once

#include "device/reduce.cuh"
#include "device/sm90/pdl.cuh"
#include "ops/fp8/quantize/emit.cuh"
#include "ops/fp8/quantize/quantize_config.h"

namespace htree::fp8 {

template <typename T_, int kThreads_, int kPacks_, int kPack_>
struct LargestTraits {
  using T = T_;
  static constexpr int kThreads = kThreads_;
  static constexpr int kPacks = kPacks_;
  static constexpr int kPack = kPack_;
  static constexpr int kTile = kThreads * kPacks * kPack;  // elements that a block takes in one step
};

// Groups of `group` columns of each row. Block b works on group b / num_splits. A whole tensor is one group.
template <typename T>
struct LargestParams {
  const T* x;
  int64_t row_stride;
  int64_t cols;
  int64_t group;
  uint32_t groups_per_row;
  uint32_t num_groups;
  uint32_t num_splits;
  uint32_t* partial;  // [num_splits, num_groups]
  int* num_overflow;  // where given, set to zero for the launch that follows
};

template <typename Tr>
__global__ void __launch_bounds__(Tr::kThreads)
    largest_kernel(const __grid_constant__ LargestParams<typename Tr::T> p) {
  using T = typename Tr::T;
  __shared__ uint32_t scratch[Tr::kThreads / device::kWarpSize];
  const uint32_t group_idx = blockIdx.x / p.num_splits;
  const uint32_t split = blockIdx.x % p.num_splits;
  const uint32_t row = group_idx / p.groups_per_row;
  const int64_t col = (group_idx - row * p.groups_per_row) * p.group;
  const int64_t length = min(p.group, p.cols - col);
  const T* x = p.x + row * p.row_stride + col;
  device::pdl_launch_and_wait();
  uint32_t best = 0;
  for (int64_t tile = int64_t{split} * Tr::kTile; tile < length; tile += int64_t{p.num_splits} * Tr::kTile) {
    Pack<T, Tr::kPack> value[Tr::kPacks];
#pragma unroll
    for (int i = 0; i < Tr::kPacks; ++i) {
      const int64_t at = tile + (i * Tr::kThreads + static_cast<int>(threadIdx.x)) * Tr::kPack;
      value[i] = at < length ? device::load_pack<Tr::kPack>(x + at) : Pack<T, Tr::kPack>{};
    }
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < Tr::kPacks; ++i) {
      bits = MaxBits{}(bits, largest_bits(value[i].data));
    }
    if (bits >= kInfinityBits<T>) {
      bits = 0;
#pragma unroll
      for (int i = 0; i < Tr::kPacks; ++i) {
        bits = MaxBits{}(bits, largest_finite_bits(value[i].data));
      }
    }
    best = MaxBits{}(best, bits);
  }
  best = device::block_reduce<Tr::kThreads, MaxBits>(best, scratch);
  if (threadIdx.x == 0) {
    p.partial[int64_t{split} * p.num_groups + group_idx] = best;
    if (blockIdx.x == 0 && p.num_overflow != nullptr) {
      *p.num_overflow = 0;
    }
  }
}

constexpr int kFinishThreads = 128;

// scale[i] from partial [num_splits, num_scales]. A scale has a warp, or one thread where
// there are many scales.
template <typename T, bool kWarpEach>
__global__ void __launch_bounds__(kFinishThreads)
    finish_scale_kernel(const uint32_t* partial, float* scale, uint32_t num_splits, int64_t num_scales) {
  constexpr int kThreads = kWarpEach ? device::kWarpSize : 1;  // threads per scale
  const int64_t idx = (int64_t{blockIdx.x} * kFinishThreads + threadIdx.x) / kThreads;
  device::pdl_launch_and_wait();
  if (idx >= num_scales) {
    return;  // where a warp works together, whole warps return
  }
  uint32_t bits = 0;
  for (uint32_t split = threadIdx.x % kThreads; split < num_splits; split += kThreads) {
    bits = MaxBits{}(bits, partial[split * num_scales + idx]);
  }
  if constexpr (kWarpEach) {
    bits = device::warp_reduce<MaxBits>(bits);
  }
  if (threadIdx.x % kThreads == 0) {
    scale[idx] = scale_of(magnitude_of<T>(bits));
  }
}

}  // namespace htree::fp8
