// Eight channels of a compressed row at a time: a byte of the bitmap and the window of up to eight codes that
// follows the codes before it. A table gives for each byte the eight 4-bit selectors of two byte permutations
// that put the codes at their channels; a selector with its upper bit set repeats the sign bit of a byte that
// is known to be clear, which makes a pruned channel 0. docs/semantics.md §4.5.
#pragma once

#include <cstdint>

namespace htree::compressed_kv {

// What a byte of the bitmap needs. Both words keep selectors in their lower halves, which is all that a
// permutation reads.
struct alignas(8) Selectors {
  uint32_t low;   // of channels 0 to 3; bit 31 is set for byte 255 alone
  uint32_t high;  // of channels 4 to 7; upper half: bits of the codes of this byte
};

// One copy per lane, so that no two lanes meet in a bank: [256][32].
constexpr int kSelectorBytes = 256 * 32 * static_cast<int>(sizeof(Selectors));

// Where the permutations find the code of rank r. 8 and 16 bits: at byte r of the window; a pruned channel
// repeats the sign of byte 7. 4 bits: even ranks in the first register, odd ones in the second, because that
// is how nibbles are cheapest to separate.
template <int kBits>
__device__ __forceinline__ Selectors selectors_of(uint32_t byte) {
  uint32_t selectors = 0;
  uint32_t rank = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t kept = byte >> i & 1;
    const uint32_t position = kBits == 4 ? (rank >> 1) + 4 * (rank & 1) : rank;
    selectors |= (kept != 0 ? position : 15u) << (4 * i);
    rank += kept;
  }
  return {(selectors & 0xffffu) | (byte == 255 ? 0x80000000u : 0u), (selectors >> 16) | (rank * kBits) << 16};
}

// Every thread of the block must call, and __syncthreads before the table is used.
template <int kBits>
__device__ __forceinline__ void fill_selectors(unsigned char* table) {
  for (int part = threadIdx.x; part < 1024; part += blockDim.x) {  // a quarter of the copies of an entry
    const Selectors s = selectors_of<kBits>(part >> 2);
    uint4* copies = reinterpret_cast<uint4*>(table + part * (8 * sizeof(Selectors)));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      copies[i] = make_uint4(s.low, s.high, s.low, s.high);
    }
  }
}

// (x & mask) ^ flip in one instruction.
__device__ __forceinline__ uint32_t mask_flip(uint32_t x, uint32_t mask, uint32_t flip) {
  uint32_t value;
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(value) : "r"(x), "r"(mask), "r"(flip));
  return value;
}

// Bytes of the pair (low, high) by the selectors in the low 16 bits. Not __byte_perm, which documents three
// bits per selector: the fourth one repeats the sign bit of the byte.
__device__ __forceinline__ uint32_t permute(uint32_t low, uint32_t high, uint32_t selectors) {
  uint32_t value;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(value) : "r"(low), "r"(high), "r"(selectors));
  return value;
}

// The 32 bits that start `bits` (taken modulo 32) above the lowest bit of `low`.
__device__ __forceinline__ uint32_t funnel(uint32_t low, uint32_t high, uint32_t bits) {
  return __funnelshift_r(low, high, bits);
}

__device__ __forceinline__ uint32_t load_shared(uint32_t address) {
  uint32_t value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address));
  return value;
}

// Address of the aligned word that holds bit `bits` of shared memory. Opaque, so that the product is an
// integer multiplication: the pipe of shifts and logical operations is the busiest one.
__device__ __forceinline__ uint32_t word_address(uint32_t bits) {
  uint32_t words;
  asm("shr.b32 %0, %1, 5;" : "=r"(words) : "r"(bits));
  return words * 4;
}

// The expanded codes of eight channels. 4 bits: two registers of four bytes that hold the codes as 4-bit
// two's complement in their lower or their upper halves, the other halves 0; 8 bits: two registers of four
// signed bytes; 16 bits: four registers of two values.
template <int kBits>
struct Expanded {
  uint32_t r[kBits == 16 ? 4 : 2];
};

// The selectors of a lane.
struct LaneTable {
  const unsigned char* table;  // of the width in question
  uint32_t lane_offset;        // 8 * lane
};

// Byte kByte of `word` selects the channels. `cursor` is the address in shared memory, in bits, of the first
// code; it moves behind the codes of this byte. kUpper: 4-bit codes in the upper halves of the bytes. Reads
// at most 20 bytes from the cursor on, whatever the bitmap holds.
template <int kBits, int kByte, bool kUpper>
__device__ __forceinline__ Expanded<kBits> expand_byte(uint32_t word, uint32_t& cursor,
                                                       const LaneTable& lane) {
  // Bytes of the offset: 8 * lane, the byte of the bitmap, 0, 0.
  const uint32_t offset = permute(word, lane.lane_offset, 0x5504 + 0x10 * kByte);
  const Selectors s = *reinterpret_cast<const Selectors*>(lane.table + offset);
  const uint32_t address = word_address(cursor);
  const uint32_t shift = cursor;
  cursor += s.high >> 16;
  // Unless all eight channels are kept, the last byte of the window belongs to others: its sign bit, which
  // pruned channels repeat, is cleared.
  const auto clear = [&s](uint32_t x) { return x & (s.low | 0x7fffffffu); };
  Expanded<kBits> out;
  if constexpr (kBits == 4) {
    const uint32_t window = funnel(load_shared(address), load_shared(address + 4), shift);
    // The sign bit of a code is flipped where it is stored: code + 8.
    const uint32_t even = kUpper ? mask_flip(window * 16, 0xf0f0f0f0u, 0x80808080u)
                                 : mask_flip(window, 0x0f0f0f0fu, 0x08080808u);
    const uint32_t odd = kUpper ? clear(mask_flip(window, 0xf0f0f0f0u, 0x80808080u))
                                : mask_flip(window >> 4, 0x0f0f0f0fu, 0x08080808u);
    out.r[0] = permute(even, odd, s.low);
    out.r[1] = permute(even, odd, s.high);
  } else if constexpr (kBits == 8) {
    const uint32_t middle = load_shared(address + 4);
    const uint32_t low = funnel(load_shared(address), middle, shift);
    const uint32_t high = clear(funnel(middle, load_shared(address + 8), shift));
    out.r[0] = permute(low, high, s.low);
    out.r[1] = permute(low, high, s.high);
  } else {
    uint32_t words[5];
#pragma unroll
    for (int i = 0; i < 5; ++i) {
      words[i] = load_shared(address + 4 * i);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] = funnel(words[i], words[i + 1], shift);
    }
    // The lower and the upper bytes of the eight values apart, expanded, and joined again.
    const uint32_t low0 = permute(words[0], words[1], 0x6420);
    const uint32_t low1 = clear(permute(words[2], words[3], 0x6420));
    const uint32_t high0 = permute(words[0], words[1], 0x7531);
    const uint32_t high1 = clear(permute(words[2], words[3], 0x7531));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t low = permute(low0, low1, i == 0 ? s.low : s.high);
      const uint32_t high = permute(high0, high1, i == 0 ? s.low : s.high);
      out.r[2 * i] = permute(low, high, 0x5140);
      out.r[2 * i + 1] = permute(low, high, 0x7362);
    }
  }
  return out;
}

}  // namespace htree::compressed_kv
