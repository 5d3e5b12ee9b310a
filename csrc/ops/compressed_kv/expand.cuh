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

// Every thread of the block must call, and __syncthreads before the table is used. A lane works out one entry
// in 16, and all lanes store their own copy of each.
template <int kBits>
__device__ __forceinline__ void fill_selectors(unsigned char* table) {
  const int lane = threadIdx.x & 31;
  for (int first = (threadIdx.x >> 5) * 16; first < 256; first += blockDim.x / 2) {
    const Selectors own = selectors_of<kBits>(first + (lane & 15));
#pragma unroll 4
    for (int i = 0; i < 16; ++i) {
      const Selectors s = {__shfl_sync(0xffffffffu, own.low, i), __shfl_sync(0xffffffffu, own.high, i)};
      reinterpret_cast<Selectors*>(table)[32 * (first + i) + lane] = s;
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

// The word kWord words behind `address` if it is at most `reach` bytes behind it, else 0. Lanes that
// need no further word take no part in the load and in its bank conflicts.
template <int kWord>
__device__ __forceinline__ uint32_t load_reached(uint32_t address, uint32_t reach) {
  uint32_t value;
  asm volatile(
      "{\n"
      ".reg .pred reached;\n"
      "setp.ge.u32 reached, %2, %3;\n"
      "mov.u32 %0, 0;\n"
      "@reached ld.shared.u32 %0, [%1 + %3];\n"
      "}\n"
      : "=r"(value)
      : "r"(address), "r"(reach), "n"(4 * kWord));
  return value;
}

// Address of the aligned word that holds bit `bits` of shared memory. Opaque, so that the product is an
// integer multiplication: the pipe of shifts and logical operations is the busiest one.
__device__ __forceinline__ uint32_t word_address(uint32_t bits) {
  uint32_t words;
  asm("shr.b32 %0, %1, 5;" : "=r"(words) : "r"(bits));
  return words * 4;
}

// Where the codes of a lane go on: the address of the next one in bits, and of the word that holds it.
struct Cursor {
  uint32_t bits;
  uint32_t address;

  __device__ __forceinline__ void set(uint32_t to) {
    bits = to;
    address = word_address(to);
  }
};

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

// Selectors for byte kByte of `word`.
template <int kByte>
__device__ __forceinline__ Selectors load_selectors(uint32_t word, const LaneTable& lane) {
  // Bytes of the offset: 8 * lane, the byte of the bitmap, 0, 0.
  const uint32_t offset = permute(word, lane.lane_offset, 0x5504 + 0x10 * kByte);
  return *reinterpret_cast<const Selectors*>(lane.table + offset);
}

// Unless all eight channels are kept, the last byte of a window belongs to others: its sign bit, which pruned
// channels repeat, is cleared.
__device__ __forceinline__ uint32_t clear_last(uint32_t x, const Selectors& s) {
  return x & (s.low | 0x7fffffffu);
}

// Eight codes of 4 bits to their channels. kUpper: in the upper halves of the bytes.
template <bool kUpper>
__device__ __forceinline__ Expanded<4> expand_nibbles(uint32_t codes, const Selectors& s) {
  // Code + 8 is stored: flipping its sign bit makes it two's complement.
  const uint32_t even =
      kUpper ? mask_flip(codes * 16, 0xf0f0f0f0u, 0x80808080u) : mask_flip(codes, 0x0f0f0f0fu, 0x08080808u);
  const uint32_t odd = kUpper ? clear_last(mask_flip(codes, 0xf0f0f0f0u, 0x80808080u), s)
                              : mask_flip(codes >> 4, 0x0f0f0f0fu, 0x08080808u);
  return {permute(even, odd, s.low), permute(even, odd, s.high)};
}

// Up to kCodes codes of 4 bits in registers, for the four bytes of a word of the bitmap.
struct NibbleWindow {
  static constexpr int kCodes = 24;
  uint32_t words[3];

  __device__ __forceinline__ void load(const Cursor& from) {
    uint32_t stored[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      stored[i] = load_shared(from.address + 4 * i);
    }
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      words[i] = funnel(stored[i], stored[i + 1], from.bits);
    }
  }

  // Leaves out the first `bits` bits, at most 32; kKept words still matter.
  template <int kKept>
  __device__ __forceinline__ void skip(uint32_t bits) {
#pragma unroll
    for (int i = 0; i < kKept; ++i) {
      words[i] = __funnelshift_rc(words[i], i + 1 < 3 ? words[i + 1] : 0u, bits);
    }
  }
};

// Byte kByte of `word` from a window that starts with its codes and ends with those of byte 3.
template <int kByte, bool kUpper>
__device__ __forceinline__ Expanded<4> expand_window(uint32_t word, NibbleWindow& window,
                                                     const LaneTable& lane) {
  const Selectors s = load_selectors<kByte>(word, lane);
  const Expanded<4> out = expand_nibbles<kUpper>(window.words[0], s);
  window.skip<3 - kByte>(s.high >> 16);
  return out;
}

// Byte kByte of `word`, whose first code is at the cursor; that moves behind the codes of this byte. kUpper:
// 4-bit codes in the upper halves of the bytes. Reads at most 20 bytes from the cursor on, whatever the
// bitmap holds.
template <int kBits, int kByte, bool kUpper>
__device__ __forceinline__ Expanded<kBits> expand_byte(uint32_t word, Cursor& cursor, const LaneTable& lane) {
  const Selectors s = load_selectors<kByte>(word, lane);
  const uint32_t address = cursor.address;
  const uint32_t shift = cursor.bits;
  cursor.set(shift + (s.high >> 16));
  const uint32_t reach = cursor.address - address;
  const uint32_t first = load_shared(address);
  const uint32_t second = load_reached<1>(address, reach);
  if constexpr (kBits == 4) {
    return expand_nibbles<kUpper>(funnel(first, second, shift), s);
  } else if constexpr (kBits == 8) {
    const uint32_t third = load_reached<2>(address, reach);
    const uint32_t low = funnel(first, second, shift);
    const uint32_t high = clear_last(funnel(second, third, shift), s);
    return {permute(low, high, s.low), permute(low, high, s.high)};
  } else {
    const uint32_t words[5] = {first, second, load_reached<2>(address, reach),
                               load_reached<3>(address, reach), load_reached<4>(address, reach)};
    uint32_t codes[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      codes[i] = funnel(words[i], words[i + 1], shift);
    }
    // The lower and the upper bytes of the eight values apart, expanded, and joined again.
    const uint32_t low0 = permute(codes[0], codes[1], 0x6420);
    const uint32_t low1 = clear_last(permute(codes[2], codes[3], 0x6420), s);
    const uint32_t high0 = permute(codes[0], codes[1], 0x7531);
    const uint32_t high1 = clear_last(permute(codes[2], codes[3], 0x7531), s);
    Expanded<kBits> out;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t low = permute(low0, low1, i == 0 ? s.low : s.high);
      const uint32_t high = permute(high0, high1, i == 0 ? s.low : s.high);
      out.r[2 * i] = permute(low, high, 0x5140);
      out.r[2 * i + 1] = permute(low, high, 0x7362);
    }
    return out;
  }
}

}  // namespace htree::compressed_kv
