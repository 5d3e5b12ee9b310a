// Kernels for elements of a row that share a scale: a few threads or a block hold a chunk of
// them in registers. The chunk is read once, the scale computed or looked up, and the result
// written once. docs/semantics/fp8.md §3.3
#pragma once

#include "device/divmod.cuh"
#include "device/sm90/pdl.cuh"
#include "ops/fp8/quantize/emit.cuh"
#include "ops/fp8/quantize/quantize_config.h"

namespace htree::fp8 {

// Where the scale comes from: from the chunk, which is a whole group; from memory; or from the partial maxima
// of the whole tensor, a few hundred numbers that every block reduces.
enum class ScaleSource { kChunk, kMemory, kPartials };

// A chunk has kThreads threads, a power of two; each has kPacks packs of kPack elements.
template <typename Job_, ScaleSource kSource_, int kThreads_, int kPacks_, int kPack_>
struct ChunkTraits {
  using Job = Job_;
  using In = typename Job::In;
  using Out = typename Job::Out;
  static constexpr ScaleSource kSource = kSource_;
  static constexpr int kThreads = kThreads_;
  static constexpr int kPacks = kPacks_;
  static constexpr int kPack = kPack_;
  static constexpr ChunkConfig kConfig{kThreads, kPacks, kPack};
  static constexpr int kBlock = kConfig.block();
  static constexpr int kChunksPerBlock = kConfig.chunks_per_block();
  static constexpr int kWarps = kThreads / device::kWarpSize;  // warps of a chunk
  static_assert((kThreads & (kThreads - 1)) == 0 && kThreads <= 1024);
};

template <typename In, typename Out>
struct ChunkParams {
  const In* x;         // [rows, cols]
  int64_t row_stride;  // of x
  const Out* dy;       // RoundBackward alone; contiguous
  Out* out;            // [rows, cols], contiguous
  float* scale;        // [rows, groups_per_row]: read from memory, else written
  int* num_overflow;   // Encode alone: one counter, zero before the launch
  const uint32_t* partial;
  int num_partials;
  int64_t cols;
  int64_t group;  // columns of a group
  uint32_t num_chunks;
  device::FastDivisor chunks_per_group;
  device::FastDivisor groups_per_row;
};

// The maximum over the kThreads threads of a chunk; all of them get it. Every thread of the block must call.
template <typename Tr>
__device__ __forceinline__ uint32_t chunk_max(uint32_t bits, uint32_t* scratch) {
  constexpr int kWidth = Tr::kThreads < device::kWarpSize ? Tr::kThreads : device::kWarpSize;
#pragma unroll
  for (int offset = kWidth / 2; offset > 0; offset /= 2) {
    bits = MaxBits{}(bits, __shfl_xor_sync(device::kFullMask, bits, offset));
  }
  if constexpr (Tr::kWarps > 1) {
    const int warp = threadIdx.x / device::kWarpSize;
    if (threadIdx.x % device::kWarpSize == 0) {
      scratch[warp] = bits;
    }
    __syncthreads();
    const int first = warp / Tr::kWarps * Tr::kWarps;
#pragma unroll
    for (int i = 0; i < Tr::kWarps; ++i) {
      bits = MaxBits{}(bits, scratch[first + i]);
    }
  }
  return bits;
}

// The part of a chunk that a thread works on.
template <typename Tr>
struct ChunkSlice {
  using In = typename Tr::In;
  using Out = typename Tr::Out;
  int64_t x_offset;
  int64_t out_offset;
  uint32_t group_idx;
  int length;  // of the chunk; 0 or less behind the last one, whose threads only take part in reductions

  __device__ __forceinline__ explicit ChunkSlice(const ChunkParams<In, Out>& p) {
    // The search for the largest magnitude left the end of x in the L2 cache, so begin there.
    const uint32_t block = Tr::kSource == ScaleSource::kPartials ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    const uint32_t chunk_idx = block * Tr::kChunksPerBlock + threadIdx.x / Tr::kThreads;
    group_idx = p.chunks_per_group.quotient(chunk_idx);
    const int64_t start =
        int64_t{p.chunks_per_group.remainder(chunk_idx, group_idx)} * Tr::kConfig.capacity();
    const uint32_t row = p.groups_per_row.quotient(group_idx);
    const int64_t first = p.groups_per_row.remainder(group_idx, row) * p.group;
    const int64_t left = min(p.group, p.cols - first) - start;
    length = chunk_idx < p.num_chunks ? static_cast<int>(min(left, int64_t{Tr::kConfig.capacity()})) : 0;
    x_offset = row * p.row_stride + first + start;
    out_offset = row * p.cols + first + start;
  }

  __device__ __forceinline__ static int col(int pack) {
    return (pack * Tr::kThreads + static_cast<int>(threadIdx.x % Tr::kThreads)) * Tr::kPack;
  }

  template <typename T>
  __device__ __forceinline__ Held<T, Tr::kPack> load(const T* from, int pack) const {
    return load_held<Tr::kPack, kIsDecode<typename Tr::Job>>(col(pack) < length, from + col(pack));
  }

  template <typename T>
  __device__ __forceinline__ void store(T* to, int pack, const Held<T, Tr::kPack>& value) const {
    if (col(pack) < length) {
      store_result<Tr::kPack>(to + col(pack), value);
    }
  }
};

// Leaves in `bits` the bits of the largest finite magnitude. Returns whether any element is not finite.
template <typename T, int kPacks, int kPack>
__device__ __forceinline__ bool largest_of_packs(const Pack<T, kPack> (&value)[kPacks], uint32_t& bits) {
  bits = 0;
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    bits = MaxBits{}(bits, largest_bits(value[i].data));
  }
  const bool is_special = bits >= kInfinityBits<T>;
  if (is_special) {
    bits = 0;
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      bits = MaxBits{}(bits, largest_finite_bits(value[i].data));
    }
  }
  return is_special;
}

template <typename Tr>
__global__ void __launch_bounds__(Tr::kBlock)
    chunk_kernel(const __grid_constant__ ChunkParams<typename Tr::In, typename Tr::Out> p) {
  using In = typename Tr::In;
  using Out = typename Tr::Out;
  using Job = typename Tr::Job;
  constexpr bool kSeeksLargest = kEncodes<Job> || Tr::kSource == ScaleSource::kChunk;
  __shared__ uint32_t scratch[Tr::kBlock / device::kWarpSize];
  const ChunkSlice<Tr> slice(p);
  device::pdl_launch_and_wait();
  const In* x = p.x + slice.x_offset;
  Held<In, Tr::kPack> value[Tr::kPacks];
#pragma unroll
  for (int i = 0; i < Tr::kPacks; ++i) {
    value[i] = slice.load(x, i);
  }
  Held<Out, Tr::kPack> upstream[kIsBackward<Job> ? Tr::kPacks : 1];
  if constexpr (kIsBackward<Job>) {
#pragma unroll
    for (int i = 0; i < Tr::kPacks; ++i) {
      upstream[i] = slice.load(p.dy + slice.out_offset, i);
    }
  }

  uint32_t bits = 0;
  bool is_special = false;
  if constexpr (kSeeksLargest) {
    is_special = largest_of_packs(value, bits);
  }
  const bool is_first = threadIdx.x % Tr::kThreads == 0;
  float s = 1.0f;
  if constexpr (Tr::kSource == ScaleSource::kChunk) {
    s = scale_of(magnitude_of<In>(chunk_max<Tr>(bits, scratch)));
    if (is_first && slice.length > 0) {
      p.scale[slice.group_idx] = s;
    }
  } else if constexpr (Tr::kSource == ScaleSource::kMemory) {
    s = slice.length > 0 ? p.scale[slice.group_idx] : 1.0f;
  } else {
    uint32_t largest = 0;
    for (int i = threadIdx.x; i < p.num_partials; i += Tr::kBlock) {
      largest = MaxBits{}(largest, p.partial[i]);
    }
    s = scale_of(magnitude_of<In>(device::block_reduce<Tr::kBlock, MaxBits>(largest, scratch)));
    if (blockIdx.x == 0 && threadIdx.x == 0) {
      *p.scale = s;
    }
  }
  Out* out = p.out + slice.out_offset;
  if constexpr (kDivides<Job>) {
    if (!is_moderate(s)) {
      // x is read again, so that it needs no registers during the divisions.
#pragma unroll 1
      for (int i = 0; i < Tr::kPacks; ++i) {
        slice.store(out, i, Job::template apply<Tr::kPack>(slice.load(x, i), {}, OneScale<false>(s)));
      }
      return;
    }
  }
  if constexpr (!std::is_same_v<Job, Nothing<In>>) {
    const OneScale<kDivides<Job>> scale(s);
#pragma unroll
    for (int i = 0; i < Tr::kPacks; ++i) {
      slice.store(out, i,
                  Job::template apply<Tr::kPack>(value[i], upstream[kIsBackward<Job> ? i : 0], scale));
    }
  }
  if constexpr (kEncodes<Job>) {
    // A finite element can overflow a given scale alone. That is rare, so x is read again and not kept.
    const bool may_overflow =
        Tr::kSource == ScaleSource::kMemory && __fmul_rn(magnitude_of<In>(bits), s) > kRoundingLimit;
    if (__any_sync(device::kFullMask, is_special || may_overflow)) {
      int count = 0;
#pragma unroll 1
      for (int i = 0; i < Tr::kPacks; ++i) {
        count += count_overflow(slice.load(x, i), OneScale<false>(s));
      }
      add_overflow(count, p.num_overflow);
    }
  }
}

}  // namespace htree::fp8
