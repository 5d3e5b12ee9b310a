// The row format of the compressed cache, shared by host and
// kernels. Torch-free. docs/semantics/compressed_kv.md §4.5
//
// A row is one token of one key/value head: a bitmap of D bits (bit d mod 64, lowest first, of word d / 64)
// and `keep` codes in the order of the channels, padded to a multiple of 4 bytes. A code of 16 bits is a raw
// half or bfloat16, one of 8 bits is two's complement, one of 4 bits is code + 8, low nibble first. With 8
// and 4 bits the row has one fp16 scale.
#pragma once

#include <cstdint>

namespace htree::compressed_kv {

// D is a multiple of 64, a word of the bitmap, up to this.
constexpr int kMostHeadDim = 512;
constexpr bool is_head_dim(int64_t size) {
  return size >= 64 && size <= kMostHeadDim && size % 64 == 0;
}

struct RowFormat {
  int head_dim;  // D
  int keep;      // kept channels, 1 ... D
  int bits;      // 16, 8 or 4

  constexpr int row_bytes() const { return (keep * bits + 31) / 32 * 4; }
  constexpr int words() const { return head_dim / 64; }
  constexpr int max_code() const { return bits == 8 ? 127 : 7; }
  constexpr bool quantised() const { return bits != 16; }
};

// Scales are fp16 bit patterns.
constexpr uint16_t kPoisonedScale = 0x7e00;  // NaN: a kept entry is NaN or infinite
constexpr uint16_t kSmallestScale = 0x0001;  // 2^-24
constexpr uint16_t kLargestScale = 0x7bff;   // 65504
// The keys of the selection are the bits of |x| * weight. Every NaN has this key, above that of infinity.
constexpr uint32_t kNanKey = 0x7f800001;

}  // namespace htree::compressed_kv
