// The channels that one lane of a warp has, taken out of a packed row. docs/semantics/compressed_kv.md §4.5
#pragma once

#include <cstdint>

namespace htree::compressed_kv {

// Which channels of a row a lane has: runs of kRun neighbouring ones, those of the 32 lanes side by side. There
// is one run where D is a power of two. Channel c of a lane is channel channel_at(lane, c) of the row.
template <int kHeadDim>
struct LaneChannels {
  static constexpr int kCount = kHeadDim / 32;
  static constexpr int kRun = kCount & -kCount;
  static constexpr int kRuns = kCount / kRun;

  static __device__ __forceinline__ int channel_at(int lane, int c) {
    return c / kRun * (32 * kRun) + lane * kRun + c % kRun;
  }
};

// Calls take(c, at) for the channels of a lane that were kept, c as in LaneChannels. `at` is the place of its
// code among the `keep` codes of the row, of which `before` belong to channels before these. words [D/32].
// Returns what `before` is for the channels behind these.
template <int kHeadDim, class Take>
__device__ __forceinline__ int for_kept_channels(const uint32_t* words, int keep, int before, int lane,
                                                 Take&& take) {
  using Lane = LaneChannels<kHeadDim>;
  const int first = lane * Lane::kRun;  // in its run, which has kRun words
#pragma unroll
  for (int run = 0; run < Lane::kRuns; ++run) {
    const uint32_t* const own = words + run * Lane::kRun;
    int rank = before;
#pragma unroll
    for (int i = 0; i < Lane::kRun; ++i) {
      const uint32_t word = own[i];
      const int below = first - 32 * i;  // channels of this word that come before the lane's first
      rank += below >= 32 ? __popc(word) : below > 0 ? __popc(word & ((1u << below) - 1)) : 0;
      before += __popc(word);
    }
    const uint32_t bits = own[first / 32] >> (first % 32);
#pragma unroll
    for (int c = 0; c < Lane::kRun; ++c) {
      if ((bits >> c & 1) != 0) {
        // A bitmap with too many bits must not read other memory.
        take(run * Lane::kRun + c, min(rank, keep - 1));
        ++rank;
      }
    }
  }
  return before;
}

// Code number `at` of a row with 8 or 4 bits.
__device__ __forceinline__ int byte_code(const uint8_t* values, int at) {
  return static_cast<int8_t>(values[at]);
}
__device__ __forceinline__ int nibble_code(const uint8_t* values, int at) {
  return (values[at >> 1] >> (4 * (at & 1)) & 15) - 8;
}

}  // namespace htree::compressed_kv
