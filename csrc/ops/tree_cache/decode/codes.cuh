// Tiles of packed tokens: where codes and scales stand in a stage of the ring, and how codes become elements of T, with
// the numbers of PackedRow in attend.cuh. docs/semantics/tree_cache.md §7.5
#pragma once

#include <type_traits>

#include "ops/tree_cache/decode/block.cuh"

namespace htree::tree_cache {

// Where the 16 bytes `chunk` of the codes of row `row` stand in a tile. A row has 2, 4 or 8 chunks. They change places
// within their row, by the line of 128 bytes in which the row stands. Then both ways of reading meet all banks: one
// chunk of eight rows, and two neighbouring ones of four rows.
template <class Tr>
__device__ __forceinline__ int code_offset(int row, int chunk) {
  constexpr int kChunks = Tr::kCodeBytes / 16;
  const int line = row / (8 / kChunks);
  const int swizzle = (line << 1 & (kChunks - 2)) | (line / (kChunks / 2) & 1);
  return row * Tr::kCodeBytes + (chunk ^ swizzle) * 16;
}

// Four codes of a word as bytes, each above its code by kCodeBias. Of codes of 4 bits they are those in even places, or
// in odd ones.
template <int kBits>
constexpr int kCodeBias = kBits == 8 ? 128 : 8;
template <int kBits>
__device__ __forceinline__ uint32_t biased_codes(uint32_t word, int odd) {
  return kBits == 8 ? word ^ 0x80808080u : word >> 4 * odd & 0x0f0f0f0fu;
}

// The bytes kLow and kHigh of biased codes, each times its scale (two fp16 in a word), as two elements of T. A code and a
// scale have 18 bits together, so a product is rounded once: by the fp16 multiplication itself, or behind an exact one
// in fp32.
template <typename T, int kBits, int kLow, int kHigh>
__device__ __forceinline__ uint32_t expand_pair(uint32_t biased, uint32_t scales) {
  constexpr int kBias = kCodeBias<kBits>;
  const __half2 factors = *reinterpret_cast<const __half2*>(&scales);
  if constexpr (std::is_same_v<T, __half>) {
    // The upper byte 0x64 makes 1024 + x of a byte x.
    const uint32_t sums = __byte_perm(biased, 0x64646464, 0x4040 | kHigh << 8 | kLow);
    constexpr uint32_t kSubtracted = (0x6400 + kBias) * 0x00010001u;
    const __half2 codes =
        __hsub2(*reinterpret_cast<const __half2*>(&sums), *reinterpret_cast<const __half2*>(&kSubtracted));
    const __half2 values = __hmul2(codes, factors);
    return *reinterpret_cast<const uint32_t*>(&values);
  } else {
    // The upper byte 0x4b makes 2^23 + x of a byte x.
    const auto code = [&](int byte) {
      return __uint_as_float(__byte_perm(biased, 0x4b000000, 0x7440 | byte)) - (8388608.0f + kBias);
    };
    const float2 wide = __half22float2(factors);
    return device::pack_pair<T>(wide.x * code(kLow), wide.y * code(kHigh));
  }
}

// The eight codes at a shared address, times one scale that a word holds twice.
template <typename T, int kBits>
__device__ __forceinline__ uint4 expand_eight(uint32_t address, uint32_t scale) {
  uint32_t first, second;  // biased, in their order
  if constexpr (kBits == 8) {
    const uint2 words = device::load_shared_8(address);
    first = biased_codes<8>(words.x, 0);
    second = biased_codes<8>(words.y, 0);
  } else {
    const uint32_t word = device::load_shared_4(address);
    const uint32_t even = biased_codes<4>(word, 0), odd = biased_codes<4>(word, 1);
    first = __byte_perm(even, odd, 0x5140);
    second = __byte_perm(even, odd, 0x7362);
  }
  return make_uint4(expand_pair<T, kBits, 0, 1>(first, scale), expand_pair<T, kBits, 2, 3>(first, scale),
                    expand_pair<T, kBits, 0, 1>(second, scale), expand_pair<T, kBits, 2, 3>(second, scale));
}

}  // namespace htree::tree_cache
