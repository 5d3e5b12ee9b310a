// The row format of the compressed cache: torch-free, shared by host and kernels.
// docs/semantics/compressed_kv.md §4.5.
//
// A row is one token of one key/value head: a bitmap of D bits (bit d mod 64, lowest first, of word d / 64)
// and `keep` codes in channel order, padded to a multiple of 4 bytes. 16 bits: raw half or bfloat16. 8 bits:
// two's complement. 4 bits: code + 8, low nibble first. With 8 and 4 bits the row has one fp16 scale.
#pragma once

#include <cstdint>

namespace htree::compressed_kv {

struct RowFormat {
  int head_dim;  // D: 64, 128 or 256
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
constexpr uint16_t kInfiniteScale = 0x7c00;
// Keys of the selection are the bits of |x| * weight; every NaN has this one, above that of infinity.
constexpr uint32_t kNanKey = 0x7f800001;

}  // namespace htree::compressed_kv
