// Pruning and packing of rows. docs/semantics/compressed_kv.md §4.4 and §4.5
//
// A thread has 32 channels of a row, which are one word of its bitmap; 2, 4, 8 or 16 neighbouring lanes have the
// row. Where D/32 is another number, the last lanes have zeros, which are never kept: of equal channels the lower
// ones stay, and those of the row are enough.
// The keys of those channels are transposed into bit planes. The keep-th largest key of the row is then found
// bit by bit from the highest down: one AND and one population count per 32 channels and bit.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "device/numeric.cuh"
#include "device/pack.cuh"
#include "ops/compressed_kv/compress/channels.cuh"
#include "ops/compressed_kv/compress/compress_launch.h"
#include "ops/compressed_kv/compress/pack_rows.cuh"

namespace htree::compressed_kv {

constexpr int kCompressThreads = 128;

// Number of bits of a key: |x| of a half type, or a product in fp32.
template <typename T, bool kWeighted>
constexpr int kKeyBits = sizeof(T) == 2 && !kWeighted ? 15 : 31;

// The bits of `a` where `mask` is set, those of `b` elsewhere, in one instruction.
__device__ __forceinline__ uint32_t select_bits(uint32_t mask, uint32_t a, uint32_t b) {
  uint32_t bits;
  asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(bits) : "r"(mask), "r"(a), "r"(b));
  return bits;
}

// One step of the transposition of a bit matrix: exchanges the bits of `upper` that lie kShift above the mask
// with those of `lower` under the mask.
template <int kShift, uint32_t kMask>
__device__ __forceinline__ void exchange_bits(uint32_t& upper, uint32_t& lower) {
  if constexpr (kShift >= 8) {  // whole bytes
    const uint32_t both = __byte_perm(upper, lower, kShift == 8 ? 0x6240 : 0x5410);
    lower = __byte_perm(upper, lower, kShift == 8 ? 0x7351 : 0x7632);
    upper = both;
    return;
  }
  static_assert(kShift >= 8 || kMask << kShift == ~kMask);
  const uint32_t first = select_bits(kMask, upper, lower << kShift);
  const uint32_t second = select_bits(kMask, upper >> kShift, lower);
  upper = first;
  lower = second;
}

template <int kShift, uint32_t kMask, int N>
__device__ __forceinline__ void exchange_rows(uint32_t (&words)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    if ((i & kShift) == 0) {
      exchange_bits<kShift, kMask>(words[i], words[i + kShift]);
    }
  }
}

// Word i of 32 words is key i. Afterwards bit i of word b is bit b of key i.
__device__ __forceinline__ void transpose_bits(uint32_t (&words)[32]) {
  exchange_rows<16, 0x0000ffffu>(words);
  exchange_rows<8, 0x00ff00ffu>(words);
  exchange_rows<4, 0x0f0f0f0fu>(words);
  exchange_rows<2, 0x33333333u>(words);
  exchange_rows<1, 0x55555555u>(words);
}
// Word i of 16 words is key i in the lower and key i + 16 in the upper half. The same, for 16 bits.
__device__ __forceinline__ void transpose_bits(uint32_t (&words)[16]) {
  exchange_rows<8, 0x00ff00ffu>(words);
  exchange_rows<4, 0x0f0f0f0fu>(words);
  exchange_rows<2, 0x33333333u>(words);
  exchange_rows<1, 0x55555555u>(words);
}

template <typename T>
constexpr uint32_t kInfinityBits = std::is_same_v<T, __half>  ? 0x7c00
                                   : std::is_same_v<T, float> ? 0x7f800000
                                                              : 0x7f80;

// The keys as bit planes: plane b holds bit b of the 32 keys.
template <typename T, bool kWeighted>
struct Planes {
  static constexpr int kBits = kKeyBits<T, kWeighted>;
  uint32_t words[kBits == 15 ? 16 : 32];
};

template <typename T, bool kWeighted>
__device__ __forceinline__ Planes<T, kWeighted> planes_of(const Channels<T>& x, const float* weight) {
  Planes<T, kWeighted> planes;
  if constexpr (Planes<T, kWeighted>::kBits == 15) {
    constexpr uint32_t kNan = kInfinityBits<T> + 1;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      planes.words[i] = __vminu2(x.words[i] & 0x7fff7fffu, kNan * 0x10001u);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const float product = kWeighted ? x.value(i) * weight[i] : x.value(i);
      planes.words[i] = min(__float_as_uint(product) & 0x7fffffffu, kNanKey);
    }
  }
  transpose_bits(planes.words);
  return planes;
}

// Sum over the kLanes neighbouring lanes that have a row.
template <int kLanes>
__device__ __forceinline__ int row_sum(int value) {
#pragma unroll
  for (int offset = 1; offset < kLanes; offset *= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, offset);
  }
  return value;
}

// Keeps the lowest `count` set bits of `mask`.
__device__ __forceinline__ uint32_t lowest_bits(uint32_t mask, int count) {
  for (int extra = __popc(mask) - count; extra > 0; --extra) {
    mask &= ~(0x80000000u >> __clz(mask));
  }
  return mask;
}

// Returns the lane's word of the bitmap of the row's `keep` largest keys, ties to the lower channel. All
// lanes must call.
template <int kLanes, typename Keys>
__device__ __forceinline__ uint32_t select_channels(const Keys& keys, int keep, int lane_of_row) {
  uint32_t equal = 0xffffffffu;  // keys that agree with the threshold so far
  uint32_t larger = 0;
  int needed = keep;
#pragma unroll
  for (int bit = Keys::kBits - 1; bit >= 0; --bit) {
    const uint32_t ones = equal & keys.words[bit];
    const int count = row_sum<kLanes>(__popc(ones));
    if (count >= needed) {
      equal = ones;
    } else {
      larger |= ones;
      needed -= count;
      equal &= ~keys.words[bit];
    }
  }
  const int own = __popc(equal);
  const int before = sum_before<kLanes>(own, lane_of_row);
  return larger | lowest_bits(equal, min(max(needed - before, 0), own));
}

template <typename T>
__device__ __forceinline__ void store_pruned(const Channels<T>& x, uint32_t selected, T* row) {
#pragma unroll
  for (int i = 0; i < 32; i += device::kPackOf<T>) {
    device::Pack<T, device::kPackOf<T>> pack;
#pragma unroll
    for (int c = 0; c < device::kPackOf<T>; ++c) {
      const uint32_t bits = (selected >> (i + c) & 1) != 0 ? x.bits(i + c) : 0u;
      if constexpr (sizeof(T) == 2) {
        reinterpret_cast<uint16_t*>(pack.data)[c] = static_cast<uint16_t>(bits);
      } else {
        reinterpret_cast<uint32_t*>(pack.data)[c] = bits;
      }
    }
    device::store_pack<device::kPackOf<T>>(row + i, pack);
  }
}

// Blocks of kCompressThreads threads. A row has kLanes lanes, at least D/32 of them.
template <typename T, int kLanes, bool kWeighted, bool kPrune>
__global__ void __launch_bounds__(kCompressThreads)
    compress_kernel(const __grid_constant__ CompressParams p) {
  static_assert(32 % kLanes == 0 && 32 * kLanes <= kMostHeadDim);
  constexpr int kRows = 32 / kLanes;  // rows of a warp
  const int lane = threadIdx.x & 31;
  const int warp = threadIdx.x >> 5;
  const int lane_of_row = lane % kLanes;
  const int own_row = lane / kLanes;
  const int64_t first = (static_cast<int64_t>(blockIdx.x) * (kCompressThreads / 32) + warp) * kRows;
  if (first >= p.num_rows) {
    return;
  }
  const int num_rows = static_cast<int>(min(static_cast<int64_t>(kRows), p.num_rows - first));
  // Lanes without a row repeat the last one, so that all lanes take part in the exchanges.
  const int64_t row = first + min(own_row, num_rows - 1);
  const int64_t head = row / p.length;
  const T* data = static_cast<const T*>(p.x) + head / p.num_heads * p.strides[0] +
                  head % p.num_heads * p.strides[1] + row % p.length * p.strides[2];
  const int words = p.format.head_dim / 32;
  // A lane behind the row takes the first channels, so that it reads nothing else, and then zeros.
  const bool within = lane_of_row < words;
  const int first_channel = within ? 32 * lane_of_row : 0;
  Channels<T> x = load_32(data + first_channel);
  if (!within) {
#pragma unroll
    for (int i = 0; i < Channels<T>::kWords; ++i) {
      x.words[i] = 0;
    }
  }
  const float* weight = kWeighted ? p.weight + head * p.format.head_dim + first_channel : nullptr;
  const Planes<T, kWeighted> keys = planes_of<T, kWeighted>(x, weight);
  const uint32_t selected = select_channels<kLanes>(keys, p.format.keep, lane_of_row);
  const bool stores = within && own_row < num_rows;
  if (stores) {
    p.bitmap[row * words + lane_of_row] = selected;
  }
  if constexpr (kPrune) {
    if (stores) {
      store_pruned(x, selected, static_cast<T*>(p.pruned) + row * p.format.head_dim + 32 * lane_of_row);
    }
  } else {
    __shared__ PackScratch<T, kLanes> scratch[kCompressThreads / 32];
    pack_rows<T, kLanes, !kWeighted>(p, x, selected, first, num_rows, scratch[warp]);
  }
}

}  // namespace htree::compressed_kv
