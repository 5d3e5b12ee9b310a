// The channels that one lane of a warp has, taken out of a packed row. docs/semantics/compressed_kv.md §4.5
#pragma once

#include <cstdint>

namespace htree::compressed_kv {

// Lane i has channels [i * D/32, (i + 1) * D/32). Calls take(c, at) for each of them that was
// kept, c counting from the lane's first. `at` is the place of its code among the `keep` codes of
// the row. words [D/32].
template <int kHeadDim, class Take>
__device__ __forceinline__ void for_kept_channels(const uint32_t* words, int keep, int lane, Take&& take) {
  constexpr int kChannels = kHeadDim / 32;
  const int first = lane * kChannels;
  int rank = 0;
#pragma unroll
  for (int i = 0; i < kHeadDim / 32; ++i) {
    const uint32_t word = words[i];
    const int below = first - 32 * i;  // channels of this word that come before the lane's first
    rank += below >= 32 ? __popc(word) : below > 0 ? __popc(word & ((1u << below) - 1)) : 0;
  }
  const uint32_t bits = words[first / 32] >> (first % 32);
#pragma unroll
  for (int c = 0; c < kChannels; ++c) {
    if ((bits >> c & 1) != 0) {
      take(c, min(rank, keep - 1));  // a bitmap with too many bits must not read other memory
      ++rank;
    }
  }
}

// Code number `at` of a row with 8 or 4 bits.
__device__ __forceinline__ int byte_code(const uint8_t* values, int at) {
  return static_cast<int8_t>(values[at]);
}
__device__ __forceinline__ int nibble_code(const uint8_t* values, int at) {
  return (values[at >> 1] >> (4 * (at & 1)) & 15) - 8;
}

}  // namespace htree::compressed_kv
