// From the channels that are kept to scales and codes. docs/semantics/compressed_kv.md §4.5
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "device/numeric.cuh"
#include "device/pack.cuh"
#include "ops/compressed_kv/compress/channels.cuh"
#include "ops/compressed_kv/compress/compress_launch.h"

namespace htree::compressed_kv {

// The fp16 scale of a row, given the fp32 bits of its largest kept magnitude.
__device__ __forceinline__ uint16_t scale_of(uint32_t largest_bits, int max_code) {
  if (largest_bits >= 0x7f800000u) {
    return kPoisonedScale;
  }
  const float scale = __fdiv_rn(__uint_as_float(largest_bits), static_cast<float>(max_code));
  const uint16_t bits = __half_as_ushort(__float2half_rn(scale));
  if (bits == 0 && largest_bits != 0) {
    return kSmallestScale;
  }
  return bits > kLargestScale ? kLargestScale : bits;
}

// A sum with this float has no bits after the binary point: 1.5 * 2^23.
constexpr float kIntegerShift = 12582912.0f;
constexpr uint32_t kIntegerShiftBits = 0x4b400000;

// x / scale rounded to the nearest even integer within [-bound, bound], as the bits of
// its sum with kIntegerShift.
__device__ __forceinline__ uint32_t shifted_code(float quotient, float bound) {
  return __float_as_uint(fminf(fmaxf(quotient, -bound), bound) + kIntegerShift);
}

// Packs the codes of 32 / kBits kept values at `kept`, of which `count` exist. `scale` is rounded already;
// where it is not a positive number, the codes are 0.
template <int kBits, typename T>
__device__ __forceinline__ uint32_t pack_codes(const T* kept, int count, float scale) {
  constexpr int kCodes = 32 / kBits;
  constexpr float kBound = kBits == 8 ? 127.0f : 7.0f;
  constexpr uint32_t kBias = kBits == 8 ? 128 : 8;
  constexpr int kPerLoad = kCodes * sizeof(T) <= 16 ? kCodes : 16 / static_cast<int>(sizeof(T));
  const auto* packs = reinterpret_cast<const device::Pack<T, kPerLoad>*>(kept);
  float x[kCodes];
#pragma unroll
  for (int i = 0; i < kCodes; ++i) {
    x[i] = i < count && scale > 0.0f ? device::to_acc(packs[i / kPerLoad].data[i % kPerLoad]) : 0.0f;
  }
  // The product with the rounded inverse is off by less than 1e-4 within the bounds, so only quotients that
  // are nearly halfway between two integers need the division.
  const float inverse = scale > 0.0f ? __frcp_rn(scale) : 0.0f;
  uint32_t shifted[kCodes];
  bool halfway = false;
#pragma unroll
  for (int i = 0; i < kCodes; ++i) {
    const float quotient = fminf(fmaxf(x[i] * inverse, -kBound), kBound);
    shifted[i] = shifted_code(quotient, kBound);
    halfway |= fabsf(quotient - (__uint_as_float(shifted[i]) - kIntegerShift)) > 0.4999f;
  }
  if (halfway) {
#pragma unroll
    for (int i = 0; i < kCodes; ++i) {
      shifted[i] = shifted_code(__fdiv_rn(x[i], scale), kBound);
    }
  }
  // Biased codes are not negative and fit their bits, so they add up to the word.
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < kCodes; ++i) {
    word += (shifted[i] - (kIntegerShiftBits - kBias)) << (kBits * i);
  }
  return kBits == 8 ? word ^ 0x80808080u : word;
}

// Word `index` of a packed row, from the row's kept values in shared memory.
template <typename T>
__device__ __forceinline__ uint32_t pack_word(const T* kept, int index, const RowFormat& format,
                                              float scale) {
  if (format.bits == 8) {
    return pack_codes<8>(kept + 4 * index, format.keep - 4 * index, scale);
  }
  if (format.bits == 4) {
    return pack_codes<4>(kept + 8 * index, format.keep - 8 * index, scale);
  }
  uint32_t word = 0;
  if constexpr (sizeof(T) == 2) {  // the checks refuse fp32
    const uint16_t* raw = reinterpret_cast<const uint16_t*>(kept);
    word = raw[2 * index];
    word |= 2 * index + 1 < format.keep ? static_cast<uint32_t>(raw[2 * index + 1]) << 16 : 0;
  }
  return word;
}

// The rows of a warp in shared memory, on the way from channels to codes.
template <typename T, int kLanes>
struct PackScratch {
  static constexpr int kRows = 32 / kLanes;
  // There are 16 bytes between rows, or the same rank of all rows would lie in one bank.
  alignas(16) T kept[kRows][32 * kLanes + 16 / sizeof(T)];
  uint16_t scales[kRows];
};

// The sum over the lanes of a row before this one. All lanes must call.
template <int kLanes>
__device__ __forceinline__ int sum_before(int own, int lane_of_row) {
  int sum = own;  // first with this lane
#pragma unroll
  for (int offset = 1; offset < kLanes; offset *= 2) {
    const int below = __shfl_up_sync(0xffffffffu, sum, offset, kLanes);
    sum += lane_of_row >= offset ? below : 0;
  }
  return sum - own;
}

// The bits of the largest magnitude of 32 channels.
template <typename T>
__device__ __forceinline__ uint32_t largest_of(const Channels<T>& x) {
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < Channels<T>::kWords; ++i) {
    if constexpr (sizeof(T) == 2) {
      largest = __vmaxu2(largest, x.words[i] & 0x7fff7fffu);
    } else {
      largest = max(largest, x.words[i] & 0x7fffffffu);
    }
  }
  return sizeof(T) == 2 ? max(largest & 0xffffu, largest >> 16) : largest;
}

// Writes values and scales of rows first ... first + num_rows - 1. All lanes must call. kLargestKept: the
// largest magnitude of a row is among those that are kept.
template <typename T, int kLanes, bool kLargestKept>
__device__ __forceinline__ void pack_rows(const CompressParams& p, const Channels<T>& x, uint32_t selected,
                                          int64_t first, int num_rows, PackScratch<T, kLanes>& scratch) {
  const int lane = threadIdx.x & 31;
  const int lane_of_row = lane % kLanes;
  const int own_row = lane / kLanes;
  const int rank = sum_before<kLanes>(__popc(selected), lane_of_row);
  using Raw = std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t>;
  Raw* to = reinterpret_cast<Raw*>(scratch.kept[own_row]) + rank;
  uint32_t largest = kLargestKept ? largest_of(x) : 0u;
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    if ((selected >> i & 1) != 0) {
      const Raw bits = static_cast<Raw>(x.bits(i));
      *to++ = bits;
      if constexpr (!kLargestKept) {
        largest = max(largest, static_cast<uint32_t>(bits) & (sizeof(T) == 2 ? 0x7fffu : 0x7fffffffu));
      }
    }
  }
  if (p.format.quantised()) {
#pragma unroll
    for (int offset = 1; offset < kLanes; offset *= 2) {
      largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
    }
    if constexpr (std::is_same_v<T, __half>) {
      largest = __float_as_uint(__half2float(__ushort_as_half(static_cast<unsigned short>(largest))));
    } else if constexpr (sizeof(T) == 2) {
      largest <<= 16;
    }
    if (lane_of_row == 0) {
      const uint16_t scale = scale_of(largest, p.format.max_code());
      scratch.scales[own_row] = scale;
      if (own_row < num_rows) {
        p.scales[first + own_row] = scale;
      }
    }
  }
  __syncwarp();
  const int row_words = p.format.row_bytes() / 4;
  uint32_t* values = p.values + first * row_words;
  // word / row_words by multiplication: both are at most 512, so the rounded inverse is close enough.
  const int inverse_words = (1 << 20) / row_words + 1;
  for (int word = lane; word < num_rows * row_words; word += 32) {
    const int row = word * inverse_words >> 20;
    const float scale = p.format.quantised() ? __half2float(__ushort_as_half(scratch.scales[row])) : 1.0f;
    values[word] = pack_word(scratch.kept[row], word - row * row_words, p.format, scale);
  }
}

}  // namespace htree::compressed_kv
