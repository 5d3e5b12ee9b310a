// Eight channels of a compressed row at a time: a byte of the bitmap and the window of up to eight codes that
// follows the codes before it. A table gives for each byte the eight 4-bit selectors of two byte permutations
// that put the codes at their channels; a selector with its upper bit set repeats the sign bit of a byte that
// is known to be clear, which makes a pruned channel 0. docs/semantics.md §4.5.
#pragma once

#include <cstdint>

namespace htree::compressed_kv {

// Selectors of every byte, one copy per lane so that no two lanes meet in a bank: [256][32] words.
constexpr int kSelectorBytes = 256 * 32 * 4;

// Where the permutations find the code of rank r. 8 and 16 bits: at byte r of the window. 4 bits: even ranks
// in the first register, odd ones in the second, because that is how nibbles are cheapest to separate.
template <int kBits>
__device__ __forceinline__ uint32_t selectors_of(uint32_t byte) {
  uint32_t selectors = 0;
  int rank = 0;
  for (int i = 0; i < 8; ++i) {
    const bool kept = (byte >> i & 1) != 0;
    const uint32_t position = kBits == 4 ? (rank >> 1) + 4 * (rank & 1) : rank;
    selectors |= (kept ? position : 15u) << (4 * i);
    rank += kept ? 1 : 0;
  }
  return selectors;
}

// Every thread of the block must call, and __syncthreads before the table is used.
template <int kBits>
__device__ __forceinline__ void fill_selectors(uint32_t* table) {
  for (int part = threadIdx.x; part < 1024; part += blockDim.x) {  // a quarter of the copies of an entry
    const uint32_t selectors = selectors_of<kBits>(part >> 2);
    uint4* copies = reinterpret_cast<uint4*>(table + part * 8);
    copies[0] = make_uint4(selectors, selectors, selectors, selectors);
    copies[1] = make_uint4(selectors, selectors, selectors, selectors);
  }
}

__device__ __forceinline__ uint32_t load_shared(uint32_t address) {
  uint32_t value;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address));
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

// The expanded codes of eight channels: 4 bits: two registers of four bytes that hold 8 * code as 7-bit two's
// complement; 8 bits: two registers of four signed bytes; 16 bits: four registers of two values.
template <int kBits>
struct Expanded {
  uint32_t r[kBits == 16 ? 4 : 2];
};

// `cursor` is the address in shared memory, in bits, of the first code; it moves behind the codes of `byte`.
// `table` is the address of this lane's column of selectors. Reads at most 20 bytes from the cursor on,
// whatever the bitmap holds.
template <int kBits>
__device__ __forceinline__ Expanded<kBits> expand_byte(uint32_t byte, uint32_t& cursor, uint32_t table) {
  const uint32_t selectors = load_shared(byte * 128 + table);
  const uint32_t address = (cursor >> 5) * 4;
  const uint32_t shift = cursor;
  const uint32_t count = __popc(byte);
  cursor += count * kBits;
  Expanded<kBits> out;
  if constexpr (kBits == 4) {
    const uint32_t window = funnel(load_shared(address), load_shared(address + 4), shift);
    const uint32_t even = ((window * 8) ^ 0x40404040u) & 0x78787878u;
    const uint32_t odd = ((window >> 1) ^ 0x40404040u) & 0x78787878u;
    out.r[0] = permute(even, odd, selectors);
    out.r[1] = permute(even, odd, selectors >> 16);
  } else {
    // Unless all eight channels are kept, byte 7 of the window belongs to others: its sign bit is cleared.
    const uint32_t whole = byte * 0x00800000u + 0x00800000u;  // bit 31 is set for byte 255 alone
    const auto clear = [whole](uint32_t x) { return x & (whole | 0x7fffffffu); };
    if constexpr (kBits == 8) {
      const uint32_t middle = load_shared(address + 4);
      const uint32_t low = funnel(load_shared(address), middle, shift);
      const uint32_t high = clear(funnel(middle, load_shared(address + 8), shift));
      out.r[0] = permute(low, high, selectors);
      out.r[1] = permute(low, high, selectors >> 16);
    } else {
      uint32_t word[5];
#pragma unroll
      for (int i = 0; i < 5; ++i) {
        word[i] = load_shared(address + 4 * i);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        word[i] = funnel(word[i], word[i + 1], shift);
      }
      // The lower and the upper bytes of the eight values apart, expanded, and joined again.
      const uint32_t low0 = permute(word[0], word[1], 0x6420);
      const uint32_t low1 = clear(permute(word[2], word[3], 0x6420));
      const uint32_t high0 = permute(word[0], word[1], 0x7531);
      const uint32_t high1 = clear(permute(word[2], word[3], 0x7531));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t low = permute(low0, low1, selectors >> (16 * i));
        const uint32_t high = permute(high0, high1, selectors >> (16 * i));
        out.r[2 * i] = permute(low, high, 0x5140);
        out.r[2 * i + 1] = permute(low, high, 0x7362);
      }
    }
  }
  return out;
}

}  // namespace htree::compressed_kv
