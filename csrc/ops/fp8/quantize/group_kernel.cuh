// One pass: each group of a row is read once into registers, reduced to its scale, and written as codes or
// values. For groups that the registers of a block hold. docs/semantics.md §3.3.
#pragma once

#include "device/divmod.cuh"
#include "ops/fp8/quantize/emit.cuh"
#include "ops/fp8/quantize/quantize_config.h"

namespace htree::fp8 {

// kThreads per group, a power of two, each with kPacks packs of kPack elements.
template <typename T_, typename Emit_, int kThreads_, int kPacks_, int kPack_>
struct GroupTraits {
  using T = T_;
  using Emit = Emit_;
  using Out = typename Emit::template Out<T>;
  static constexpr int kThreads = kThreads_;
  static constexpr int kPacks = kPacks_;
  static constexpr int kPack = kPack_;
  static constexpr GroupConfig kConfig{kThreads, kPacks, kPack};
  static constexpr int kBlock = kConfig.block();
  static constexpr int kGroupsPerBlock = kConfig.groups_per_block();
  static constexpr int kWarps = kThreads / device::kWarpSize;
  static_assert((kThreads & (kThreads - 1)) == 0 && kThreads <= 1024);
};

template <typename T, typename Out>
struct GroupParams {
  const T* x;          // [rows, cols]
  int64_t row_stride;  // of x
  Out* out;            // [rows, cols], contiguous
  float* scale;        // [rows, groups_per_row]
  int* num_overflow;   // one counter, zero before the launch; may be null where values are emitted
  int64_t cols;
  int64_t group;  // columns of a group, at most what the threads hold
  uint32_t num_groups;
  device::FastDivisor groups_per_row;
};

// Maximum over the kThreads threads of a group; all of them get it. Every thread of the block must call.
template <typename Tr>
__device__ __forceinline__ uint32_t group_max(uint32_t bits, uint32_t* scratch) {
  if constexpr (Tr::kWarps > 1) {
    return device::block_reduce<Tr::kThreads, MaxBits>(bits, scratch);
  } else {
#pragma unroll
    for (int offset = Tr::kThreads / 2; offset > 0; offset /= 2) {
      bits = MaxBits{}(bits, __shfl_xor_sync(device::kFullMask, bits, offset));
    }
    return bits;
  }
}

// The part of a group that a thread works on.
template <typename Tr>
struct GroupSlice {
  const typename Tr::T* x;
  int64_t out_offset;
  uint32_t group_idx;
  int length;  // 0 behind the last group: nothing to load, but a part in the reductions

  __device__ __forceinline__ explicit GroupSlice(
      const GroupParams<typename Tr::T, typename Tr::Out>& p)
      : group_idx(blockIdx.x * Tr::kGroupsPerBlock + threadIdx.x / Tr::kThreads) {
    const uint32_t row = p.groups_per_row.quotient(group_idx);
    const int64_t first = p.groups_per_row.remainder(group_idx, row) * p.group;
    length = group_idx < p.num_groups ? static_cast<int>(min(p.group, p.cols - first)) : 0;
    x = p.x + row * p.row_stride + first;
    out_offset = row * p.cols + first;
  }

  __device__ __forceinline__ static int col(int pack) {
    return (pack * Tr::kThreads + static_cast<int>(threadIdx.x % Tr::kThreads)) * Tr::kPack;
  }

  __device__ __forceinline__ Pack<typename Tr::T, Tr::kPack> load(int pack) const {
    return col(pack) < length ? device::load_pack<Tr::kPack>(x + col(pack))
                              : Pack<typename Tr::T, Tr::kPack>{};
  }
};

template <typename Tr>
__global__ void __launch_bounds__(Tr::kBlock)
    group_kernel(const __grid_constant__ GroupParams<typename Tr::T, typename Tr::Out> p) {
  using T = typename Tr::T;
  __shared__ uint32_t scratch[Tr::kBlock / device::kWarpSize];
  const GroupSlice<Tr> slice(p);
  Pack<T, Tr::kPack> value[Tr::kPacks];
#pragma unroll
  for (int i = 0; i < Tr::kPacks; ++i) {
    value[i] = slice.load(i);
  }

  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < Tr::kPacks; ++i) {
    bits = MaxBits{}(bits, largest_bits(value[i].data));
  }
  const bool is_special = bits >= kInfinityBits<T>;
  if (is_special) {
    bits = 0;
#pragma unroll
    for (int i = 0; i < Tr::kPacks; ++i) {
      bits = MaxBits{}(bits, largest_finite_bits(value[i].data));
    }
  }
  const OneScale scale(scale_of(magnitude_of<T>(group_max<Tr>(bits, scratch))));
  if (threadIdx.x % Tr::kThreads == 0 && slice.length > 0) {
    p.scale[slice.group_idx] = scale.of(0);
  }

  if constexpr (!std::is_same_v<typename Tr::Emit, EmitNothing>) {
    typename Tr::Out* out = p.out + slice.out_offset;
#pragma unroll
    for (int i = 0; i < Tr::kPacks; ++i) {
      if (slice.col(i) < slice.length) {
        device::store_pack(out + slice.col(i), Tr::Emit::template apply<T, Tr::kPack>(value[i], scale));
      }
    }
  }
  if constexpr (std::is_same_v<typename Tr::Emit, EmitCodes>) {
    // No finite element overflows the scale of its own group: Inf alone does. Rare, so x is read again
    // instead of being kept in registers.
    if (__any_sync(device::kFullMask, is_special)) {
      int count = 0;
      for (int i = 0; i < Tr::kPacks; ++i) {
        count += count_overflow(slice.load(i), scale);
      }
      add_overflow(count, p.num_overflow);
    }
  }
}

}  // namespace htree::fp8
