// One scale for the whole tensor: the partial maxima of largest_kernel, a few hundred numbers, are reduced by
// every block, which then writes its part. Blocks go from the end of x to its start: what the first launch
// read last is still in the L2 cache. docs/semantics.md §3.3.
#pragma once

#include "ops/fp8/quantize/emit.cuh"

namespace htree::fp8 {

template <typename T_, typename Emit_, int kThreads_, int kPacks_, int kPack_, int kMinBlocks_ = 1>
struct TensorTraits {
  using T = T_;
  using Emit = Emit_;
  using Out = typename Emit::template Out<T>;
  static constexpr int kThreads = kThreads_;
  static constexpr int kPacks = kPacks_;
  static constexpr int kPack = kPack_;
  static constexpr int kMinBlocks = kMinBlocks_;
  static constexpr int kTile = kThreads * kPacks;  // packs of a block
};

template <typename T, typename Out>
struct TensorParams {
  const T* x;               // num_packs packs, contiguous
  Out* out;
  const uint32_t* partial;  // [num_partials]
  float* scale;             // written
  int* num_overflow;        // zero before the launch; may be null where values are emitted
  int64_t num_packs;
  int num_partials;
};

template <typename Tr>
__global__ void __launch_bounds__(Tr::kThreads, Tr::kMinBlocks)
    tensor_kernel(const __grid_constant__ TensorParams<typename Tr::T, typename Tr::Out> p) {
  using T = typename Tr::T;
  __shared__ uint32_t scratch[Tr::kThreads / device::kWarpSize];
  const int64_t first = int64_t{gridDim.x - 1 - blockIdx.x} * Tr::kTile + threadIdx.x;
  const auto load = [&](int i) {
    const int64_t pack = first + i * Tr::kThreads;
    return pack < p.num_packs ? device::load_pack<Tr::kPack>(p.x + pack * Tr::kPack) : Pack<T, Tr::kPack>{};
  };
  Pack<T, Tr::kPack> value[Tr::kPacks];
#pragma unroll
  for (int i = 0; i < Tr::kPacks; ++i) {
    value[i] = load(i);
  }
  uint32_t largest = 0;
  for (int i = threadIdx.x; i < p.num_partials; i += Tr::kThreads) {
    largest = MaxBits{}(largest, p.partial[i]);
  }
  largest = device::block_reduce<Tr::kThreads, MaxBits>(largest, scratch);
  const OneScale scale(scale_of(magnitude_of<T>(largest)));
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    *p.scale = scale.of(0);
  }

  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < Tr::kPacks; ++i) {
    const int64_t pack = first + i * Tr::kThreads;
    bits = MaxBits{}(bits, largest_bits(value[i].data));
    if (pack < p.num_packs) {
      device::store_pack(p.out + pack * Tr::kPack, Tr::Emit::template apply<T, Tr::kPack>(value[i], scale));
    }
  }
  if constexpr (std::is_same_v<typename Tr::Emit, EmitCodes>) {
    // No finite element overflows the scale of its own tensor: Inf alone does.
    if (__any_sync(device::kFullMask, bits >= kInfinityBits<T>)) {
      int count = 0;
      for (int i = 0; i < Tr::kPacks; ++i) {
        count += count_overflow(load(i), scale);
      }
      add_overflow(count, p.num_overflow);
    }
  }
}

}  // namespace htree::fp8
