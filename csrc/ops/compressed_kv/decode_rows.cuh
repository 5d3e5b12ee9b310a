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
  static constexpr int kGroups = kHeadDim / 32;  // groups of eight channels of a lane
  static constexpr int kWords = kHeadDim == 256 ? 2 : 1;
  // Warps hide each other's latencies as long as their registers suffice.
  static constexpr int kMaxWarps = kHeadDim == 256                                     ? 8
                                   : kHeads == 4 && kKeyBits != 16 && kValueBits != 16 ? 20
                                                                                       : 16;
  static constexpr bool kTwoTables = kKeyBits != kValueBits;
  static constexpr int kTableBytes = (kTwoTables ? 2 : 1) * kSelectorBytes;
  // Weights of 8 and 4-bit values are fp16, whatever the query is.
  using Weight = std::conditional_t<kValueBits == 16, T, __half>;
};

// Where a lane finds its channels of the rows g and g + 8 of a tile whose stage begins at address 0.
struct LaneRows {
  uint32_t bitmap;      // address, of row g
  uint32_t values;      // address in bits, of row g
  uint32_t pitch_bits;  // between rows g and g + 8
  uint32_t scales;      // address, of row g
};

// The bitmap words of two rows in this lane's channels, and where their codes start.
template <typename Tr>
struct RowPair {
  uint32_t word[2][Tr::kWords];
  Cursor cursor[2];
  NibbleWindow window[2];  // of the word in hand, where windows are used
};

// The same of K and of V.
template <typename Tr>
struct TileRows {
  uint32_t k_word[2][Tr::kWords];
  uint32_t v_word[2][Tr::kWords];
  uint32_t ranks;  // codes of each row before this lane's: bytes for the rows g and g + 8 of K, then of V
  bool fits;       // no word of 4-bit rows has more codes than a window; alike in all lanes
};

template <int kHeadDim, int kWords>
__device__ __forceinline__ void load_words(uint32_t address, int t, uint32_t (&word)[2][kWords]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      word[half][i] = load_shared(address + half * kHeadDim + 4 * i);
      if constexpr (kHeadDim == 64) {
        word[half][i] = (word[half][i] >> (16 * (t & 1))) & 0xffffu;
      }
    }
  }
}

// Of the tile whose bitmaps of K and V are at these shared addresses. kTail: it has only `num_tokens` rows.
template <typename Tr, bool kTail>
__device__ __forceinline__ TileRows<Tr> load_rows(uint32_t k_bitmap, uint32_t v_bitmap, int num_tokens,
                                                  int lane) {
  const int g = lane >> 2;
  const int t = lane & 3;
  TileRows<Tr> rows;
  load_words<Tr::kD>(k_bitmap, t, rows.k_word);
  load_words<Tr::kD>(v_bitmap, t, rows.v_word);
  int count[4] = {};
  int most = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const bool present = !kTail || g + 8 * half < num_tokens;
#pragma unroll
    for (int i = 0; i < Tr::kWords; ++i) {
      if constexpr (kTail) {  // rows behind the last token hold whatever was there before
        rows.k_word[half][i] = present ? rows.k_word[half][i] : 0u;
        rows.v_word[half][i] = present ? rows.v_word[half][i] : 0u;
      }
      const int in_k = __popc(rows.k_word[half][i]);
      const int in_v = __popc(rows.v_word[half][i]);
      count[half] += in_k;
      count[2 + half] += in_v;
      most = Tr::kK == 4 ? max(most, in_k) : most;
      most = Tr::kV == 4 ? max(most, in_v) : most;
    }
  }
  constexpr bool kNibbles = Tr::kK == 4 || Tr::kV == 4;
  // Half a word of the bitmap always fits.
  rows.fits = kNibbles && !kTail && (Tr::kD == 64 || __all_sync(0xffffffffu, most <= NibbleWindow::kCodes));
  // Exclusive sums over the lanes of a quad, all rows in one register: at most 3/4 of the channels.
  const uint32_t counts = count[0] + (count[1] << 8) + (count[2] << 16) + (count[3] << 24);
  uint32_t below = __shfl_up_sync(0xffffffffu, counts, 1, 4);
  uint32_t sum = t >= 1 ? below : 0;
  below = __shfl_up_sync(0xffffffffu, counts + sum, 2, 4);
  rows.ranks = sum + (t >= 2 ? below : 0);
  return rows;
}

// The rows of K (kFirstByte: 0) or of V (2), whose values start at bit `first` of shared memory, rows g and
// g + 8 `pitch_bits` apart.
template <typename Tr, int kBits, int kFirstByte>
__device__ __forceinline__ RowPair<Tr> row_pair(const uint32_t (&word)[2][Tr::kWords], uint32_t ranks,
                                                uint32_t first, uint32_t pitch_bits) {
  RowPair<Tr> rows;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int i = 0; i < Tr::kWords; ++i) {
      rows.word[half][i] = word[half][i];
    }
    const uint32_t rank = permute(ranks, 0, 0x4440 + kFirstByte + half);
    rows.cursor[half].set(first + half * pitch_bits + rank * kBits);
  }
  return rows;
}

// The codes of group kGroup of both rows, groups in their order. kWindow: `fits`, and 4 bits.
template <int kBits, int kGroup, bool kUpper, bool kWindow, typename Tr>
__device__ __forceinline__ void expand_group(RowPair<Tr>& rows, const LaneTable& lane, Expanded<kBits>& low,
                                             Expanded<kBits>& high) {
  constexpr int kWord = kGroup / 4;
  constexpr int kByte = kGroup % 4;
  if constexpr (kWindow) {
    if constexpr (kByte == 0) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        rows.window[half].load(rows.cursor[half]);
        if constexpr (kWord + 1 < Tr::kWords) {
          rows.cursor[half].set(rows.cursor[half].bits + 4 * __popc(rows.word[half][kWord]));
        }
      }
    }
    low = expand_window<kByte, kUpper>(rows.word[0][kWord], rows.window[0], lane);
    high = expand_window<kByte, kUpper>(rows.word[1][kWord], rows.window[1], lane);
  } else {
    low = expand_byte<kBits, kByte, kUpper>(rows.word[0][kWord], rows.cursor[0], lane);
    high = expand_byte<kBits, kByte, kUpper>(rows.word[1][kWord], rows.cursor[1], lane);
  }
}

}  // namespace htree::compressed_kv
