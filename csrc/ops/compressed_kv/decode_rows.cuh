// What the decode kernel is compiled for, and how a lane finds its channels of the rows of a tile.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "ops/compressed_kv/expand.cuh"

namespace htree::compressed_kv {

// kHeads: 4 or 8 query heads of a block.
template <int kHeadDim, int kKeyBits, int kValueBits, int kHeads, typename T>
struct DecodeTraits {
  using Pair = T;  // of 16-bit values
  static constexpr int kD = kHeadDim;
  static constexpr int kK = kKeyBits;
  static constexpr int kV = kValueBits;
  static constexpr int kHeadPairs = kHeads / 4;  // heads of a lane: t, t + 4
  static constexpr bool kIntegerKeys = kKeyBits != 16;
  // Words of 32 channels of a row. Byte t of each is that of the lanes of column t: eight channels, a group.
  static constexpr int kGroups = kHeadDim / 32;
  static constexpr int kOwnWords = (kGroups + 3) / 4;  // of the bytes of a lane
  // Warps hide each other's latencies as long as their registers suffice.
  static constexpr int kMaxWarps = kHeadDim == 256                                     ? 8
                                   : kHeads == 4 && kKeyBits != 16 && kValueBits != 16 ? 20
                                                                                       : 16;
  static constexpr bool kTwoTables = kKeyBits != kValueBits;
  static constexpr int kTableBytes = (kTwoTables ? 2 : 1) * kSelectorBytes;
  // Weights of 8 and 4-bit values are fp16, whatever the query is.
  using Weight = std::conditional_t<kValueBits == 16, T, __half>;
};

// Where a lane finds the first of its two rows of a tile, in a stage that begins at address 0.
struct LaneRows {
  uint32_t bitmap;       // address
  uint32_t values;       // address in bits
  uint32_t values_step;  // from there to the second row, in bits
  uint32_t scales;       // address
};

// The four lanes of a row read codes that lie together, which take about four words of shared memory. Rows of
// an odd multiple of four words apart are read without bank conflicts; where the pitch of rows is an odd
// multiple of two words, those are every other row: lanes (g, t) then take the rows 2g and 2g + 1, else the
// rows g and g + 8.
__host__ __device__ constexpr int spread_of_rows(int pitch) {
  return pitch / 4 % 4 == 2 ? 2 : 1;
}

// Two rows of a tile: where the bitmap of the first one is and how far that of the second, and the bits of
// shared memory up to which codes are counted: those before the word in hand, with 4 bits those before the
// lane's byte of `last`, the word before. Not `present`: the row reads as empty.
struct RowPair {
  uint32_t bitmap;
  uint32_t bitmap_step;
  uint32_t start[2];
  uint32_t last[2];
  bool present[2];

  __device__ __forceinline__ RowPair(uint32_t stage, const LaneRows& at, uint32_t bitmap_step,
                                     const bool (&present)[2])
      : bitmap(stage + at.bitmap),
        bitmap_step(bitmap_step),
        start{stage * 8 + at.values, stage * 8 + at.values + at.values_step},
        last{0, 0},
        present{present[0], present[1]} {}

  // Bits of the channels 32 * group to 32 * group + 31.
  __device__ __forceinline__ uint32_t word(int half, int group) const {
    const uint32_t bits = load_shared(bitmap + half * bitmap_step + 4 * group);
    return present[half] ? bits : 0u;
  }
};

// The codes of group kGroup of both rows, groups in their order.
template <int kBits, int kGroup, bool kUpper>
__device__ __forceinline__ void expand_group(RowPair& rows, const unsigned char* table, const LaneByte& lane,
                                             Expanded<kBits> (&codes)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t word = rows.word(half, kGroup);
    if constexpr (kBits == 4) {
      // The codes of the 32 channels from the lane's byte of one word to that of the next: fewer instructions
      // than below, but one more for the busiest pipe of the other widths.
      rows.start[half] += kBits * __popc(funnel(rows.last[half], word, lane.shift));
      rows.last[half] = word;
      codes[half] = expand_byte<kBits, kUpper>(word, rows.start[half], table, lane);
    } else {
      const uint32_t start = rows.start[half];
      codes[half] = expand_byte<kBits, kUpper>(word, start + kBits * __popc(word * lane.below), table, lane);
      rows.start[half] = start + kBits * __popc(word);
    }
  }
}

}  // namespace htree::compressed_kv
