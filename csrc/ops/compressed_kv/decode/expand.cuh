// Expands eight channels of a compressed row at a time: a byte of the bitmap, and the stretch of up to eight
// codes that belongs to it. For each byte a table gives the eight 4-bit selectors of two byte permutations
// that put the codes at their channels. A selector with its upper bit set repeats the sign bit of a byte that
// is known to be clear, which makes a pruned channel 0. docs/semantics/compressed_kv.md §4.5
#pragma once

#include <cstdint>
#include <type_traits>

namespace htree::compressed_kv {

// What a byte of the bitmap needs. Both words keep selectors in their lower halves, all that a permutation reads.
struct alignas(8) Selectors {
  uint32_t low;   // for channels 0 to 3; bit 31 is set for byte 255 alone
  uint32_t high;  // for channels 4 to 7; with 16 bits the upper six are thresholds of words 2, 3 and 4
};

// Each lane has its own copy, so that no two lanes meet in a bank: [256][32].
constexpr int kSelectorBytes = 256 * 32 * static_cast<int>(sizeof(Selectors));

// A stretch of codes may begin anywhere in its first word. With 4-bit and 8-bit codes all words that it may
// have are read: a test would cost more. Words 2 to 4 of a stretch of 16-bit codes are read only by lanes
// that need them, so that the others take no part in bank conflicts. This is the threshold of word `word`,
// two bits, for a byte with `kept` bits set; start_of() says what exceeds it.
__device__ __forceinline__ uint32_t threshold_of(uint32_t kept, uint32_t word) {
  return kept > 2 * word ? 0 : kept == 2 * word ? 1 : 3;
}

// Where the permutations find the code of rank r. With 8 and 16 bits it is byte r of the stretch, and a
// pruned channel repeats the sign of byte 7. With 4 bits even ranks are in the first register and odd ones in
// the second, because nibbles are separated most cheaply like that.
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
  uint32_t thresholds = 0;
  if constexpr (kBits == 16) {
#pragma unroll
    for (uint32_t word = 2; word <= 4; ++word) {
      thresholds |= threshold_of(rank, word) << (34 - 2 * word);
    }
  }
  return {(selectors & 0xffffu) | (byte == 255 ? 0x80000000u : 0u), (selectors >> 16) | thresholds};
}

// Every thread of the block must call, and __syncthreads before the table is used. A lane works out one entry
// in 16; all lanes store their own copy of each entry.
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

// Bytes of the pair (low, high) by the selectors in the low 16 bits. This is not __byte_perm, which documents
// three bits per selector: the fourth bit repeats the sign bit of the byte.
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

// Loads the word kWord words behind `address` if `start`, made by start_of(), exceeds the threshold in the
// upper bits of `threshold`. Otherwise its codes are not used, and any result will do: it returns the
// address, which takes no register of its own.
template <int kWord>
__device__ __forceinline__ uint32_t load_reached(uint32_t address, uint32_t start, uint32_t threshold) {
  uint32_t value = address;
  asm volatile(
      "{\n"
      ".reg .pred reached;\n"
      "setp.gt.u32 reached, %1, %2;\n"
      "@reached ld.shared.u32 %0, [%0 + %3];\n"
      "}\n"
      : "+r"(value)
      : "r"(start), "r"(threshold), "n"(4 * kWord));
  return value;
}

// Address of the aligned word that holds bit `bits` of shared memory. It hides the product from the compiler,
// so that it is an integer multiplication: the pipe of shifts and logical operations is the busiest one.
__device__ __forceinline__ uint32_t word_address(uint32_t bits) {
  uint32_t words;
  asm("shr.b32 %0, %1, 5;" : "=r"(words) : "r"(bits));
  return words * 4;
}

// For load_reached. The result always exceeds a threshold of 0 and never one of 3. It exceeds 1 where the
// stretch whose first value is at bit `bits` of shared memory begins at the second value of its word.
__device__ __forceinline__ uint32_t start_of(uint32_t bits) {
  return (bits << 27) + 0x40000000u;
}

// The expanded codes of eight channels. With 4 bits: two registers of four bytes, which hold the codes as
// 4-bit two's complement in their lower or their upper halves; the other halves are 0. With 8 bits: two
// registers of four signed bytes. With 16 bits: four registers of two values.
template <int kBits>
struct Expanded {
  uint32_t r[kBits == 16 ? 4 : 2];
};

// A permutation with it takes byte `byte` of a word, times 256, and `copy`.
__host__ __device__ constexpr uint32_t pick_of(uint32_t byte) {
  return 0x5504u + 0x10u * byte;
}

// Which byte of every word of a bitmap is the lane's own, and the lane's copy of the selectors.
struct LaneByte {
  uint32_t copy;   // 8 * lane
  uint32_t pick;   // pick_of() that byte
  uint32_t shift;  // bits below that byte
  uint32_t below;  // a product with it keeps only those bits of a word

  __device__ __forceinline__ explicit LaneByte(int lane)
      : copy(8u * lane),
        pick(pick_of(lane & 3)),
        shift(8u * (lane & 3)),
        below(shift == 0 ? 0u : 1u << (32 - shift)) {
    asm volatile("" : "+r"(pick), "+r"(shift), "+r"(below));  // kept in registers
  }
};

// The selectors for the byte of `word` that `pick` takes, from the table for the width of the codes.
__device__ __forceinline__ Selectors load_selectors(uint32_t word, const unsigned char* table, uint32_t copy,
                                                    uint32_t pick) {
  return *reinterpret_cast<const Selectors*>(table + permute(word, copy, pick));
}

// Unless all eight channels are kept, the last byte of a stretch belongs to other channels. Its sign bit,
// which pruned channels repeat, is cleared.
__device__ __forceinline__ uint32_t clear_last(uint32_t x, const Selectors& s) {
  return x & (s.low | 0x7fffffffu);
}

// Puts eight codes of 4 bits at their channels. kUpper: in the upper halves of the bytes.
template <bool kUpper>
__device__ __forceinline__ Expanded<4> expand_nibbles(uint32_t codes, const Selectors& s) {
  // Code + 8 is stored: flipping the sign bit makes it two's complement.
  const uint32_t even =
      kUpper ? mask_flip(codes * 16, 0xf0f0f0f0u, 0x80808080u) : mask_flip(codes, 0x0f0f0f0fu, 0x08080808u);
  const uint32_t odd = kUpper ? clear_last(mask_flip(codes, 0xf0f0f0f0u, 0x80808080u), s)
                              : mask_flip(codes >> 4, 0x0f0f0f0fu, 0x08080808u);
  return {permute(even, odd, s.low), permute(even, odd, s.high)};
}

// Expands the codes of the lane's byte of `word`, the first of which starts at bit `bits` of shared memory.
// kUpper: 4-bit codes go into the upper halves of the bytes. It reads at most 20 bytes from there on,
// whatever the bitmap holds.
template <int kBits, bool kUpper>
__device__ __forceinline__ Expanded<kBits> expand_byte(uint32_t word, uint32_t bits,
                                                       const unsigned char* table, const LaneByte& lane) {
  const Selectors s = load_selectors(word, table, lane.copy, lane.pick);
  const uint32_t address = word_address(bits);
  const uint32_t first = load_shared(address);
  const uint32_t second = load_shared(address + 4);
  if constexpr (kBits == 4) {
    return expand_nibbles<kUpper>(funnel(first, second, bits), s);
  } else if constexpr (kBits == 8) {
    const uint32_t third = load_shared(address + 8);
    const uint32_t low = funnel(first, second, bits);
    const uint32_t high = clear_last(funnel(second, third, bits), s);
    return {permute(low, high, s.low), permute(low, high, s.high)};
  } else {
    const uint32_t start = start_of(bits);
    const uint32_t words[5] = {first, second, load_reached<2>(address, start, s.high),
                               load_reached<3>(address, start, s.high * 4),
                               load_reached<4>(address, start, s.high * 16)};
    uint32_t codes[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      codes[i] = funnel(words[i], words[i + 1], bits);
    }
    // The lower and the upper bytes of the eight values are separated, expanded, and joined again.
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

// ---- the two rows of a lane

// Where a lane finds the first of its two rows of a tile, in a stage that begins at address 0.
struct LaneRows {
  uint32_t bitmap;       // address
  uint32_t values;       // address, counted in bits
  uint32_t values_step;  // from there to the second row, in bits
  uint32_t scales;       // address
};

// The four lanes of a row read codes that lie together, in about four words of shared memory. Rows that are
// an odd multiple of four words apart are read without bank conflicts. Where the pitch of rows is an odd
// multiple of two words, every other row is so far apart: lanes (g, t) then take rows 2g and 2g + 1.
// Otherwise they take rows g and g + 8.
__host__ __device__ constexpr int spread_of_rows(int pitch) {
  return pitch / 4 % 4 == 2 ? 2 : 1;
}

// Which channels lane t of the four of a row takes: run t of every four runs of neighbouring channels. Its
// groups are the bytes of its runs in the bitmap. In long runs the codes of several groups are loaded together.
// That pays with 4 bits alone: with more, the codes of the four lanes lie so far apart that they meet in banks.
template <int kHeadDim, int kBits>
struct Runs {
  static constexpr bool kLong = kBits == 4 && kHeadDim % 128 == 0;
  static constexpr int kChannels = kLong ? 32 : 8;
  static constexpr int kCount = kHeadDim / (4 * kChannels);
  static constexpr int kGroups = kChannels / 8;  // of a run

  __host__ __device__ static constexpr int first_channel(int group, int t) {
    return kChannels * (4 * (group / kGroups) + t) + 8 * (group % kGroups);
  }
  __host__ __device__ static constexpr int lane_of(int channel) { return channel / kChannels % 4; }
  __host__ __device__ static constexpr int group_of(int channel) {
    return channel / (4 * kChannels) * kGroups + channel % kChannels / 8;
  }
};

// Loads the words of a row of a bitmap, as many at once as its alignment allows. The lanes of a row load the
// same words.
template <int kWords>
__device__ __forceinline__ void load_words(uint32_t address, uint32_t (&words)[kWords]) {
  constexpr int kAtOnce = kWords % 4 == 0 ? 4 : 2;
#pragma unroll
  for (int i = 0; i < kWords; i += kAtOnce) {
    if constexpr (kAtOnce == 4) {
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(words[i]), "=r"(words[i + 1]), "=r"(words[i + 2]), "=r"(words[i + 3])
                   : "r"(address + 4 * i));
    } else {
      asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                   : "=r"(words[i]), "=r"(words[i + 1])
                   : "r"(address + 4 * i));
    }
  }
}

// Two rows of a tile: the words of their bitmaps, and for each row the bit of shared memory up to which its
// codes have been counted. That is where the codes of the current word begin, or, with 4 bits, those of the
// lane's byte of `last`, the word before. A row that is not `present` reads as empty.
template <int kWords>
struct BytePair {
  uint32_t words[2][kWords];
  uint32_t start[2];
  uint32_t last[2];

  __device__ __forceinline__ BytePair(uint32_t stage, const LaneRows& at, uint32_t bitmap_step,
                                      const bool (&present)[2])
      : start{stage * 8 + at.values, stage * 8 + at.values + at.values_step}, last{0, 0} {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      load_words(stage + at.bitmap + half * bitmap_step, words[half]);
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        words[half][i] = present[half] ? words[half][i] : 0u;
      }
    }
  }

  // The bits of groups 4 * index to 4 * index + 3 of the lane.
  __device__ __forceinline__ uint32_t own_bits(int half, int index, int lane) const {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 4 * index; i < 4 * index + 4 && i < kWords; ++i) {
      bits |= (words[half][i] >> (8 * (lane & 3)) & 0xffu) << (8 * (i % 4));
    }
    return bits;
  }
};

// Expands the codes of group kGroup of both rows; it is called for the groups in their order.
template <int kBits, int kGroup, bool kUpper, bool kFew, int kWords>
__device__ __forceinline__ void expand_group(BytePair<kWords>& rows, const unsigned char* table,
                                             const LaneByte& lane, Expanded<kBits> (&codes)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t word = rows.words[half][kGroup];
    if constexpr (kBits == 4) {
      // Counts the codes of the 32 channels from the lane's byte of one word to that of the next. That takes
      // fewer instructions than below, but one more for the pipe that is busiest with the other widths.
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

// ---- long runs of 4-bit codes

// The 64 bits of shared memory that start at any bit.
struct CodeWindow {
  uint32_t low;
  uint32_t high;

  __device__ __forceinline__ void load(uint32_t bits) {
    const uint32_t address = word_address(bits);
    const uint32_t first = load_shared(address);
    const uint32_t second = load_shared(address + 4);
    const uint32_t third = load_shared(address + 8);
    low = funnel(first, second, bits);
    high = funnel(second, third, bits);
  }
  // The 32 bits that start at bit `bits` of 0 to 64; what lies behind the window is not used.
  __device__ __forceinline__ uint32_t at(uint32_t bits) const {
    uint32_t codes;
    asm("{\n"
        ".reg .b64 window;\n"
        "mov.b64 window, {%1, %2};\n"
        "shr.b64 window, window, %3;\n"
        "cvt.u32.u64 %0, window;\n"
        "}"
        : "=r"(codes)
        : "r"(low), "r"(high), "r"(bits));
    return codes;
  }
};

// Sums of the bytes of x over a lane and those before it in its row.
__device__ __forceinline__ uint32_t sum_in_row(uint32_t x) {
#pragma unroll
  for (int offset = 1; offset < 4; offset *= 2) {
    asm volatile(
        "{\n"
        ".reg .b32 before;\n"
        ".reg .pred inside;\n"
        "shfl.sync.up.b32 before|inside, %0, %1, 0x1c00, 0xffffffff;\n"
        "@inside add.u32 %0, %0, before;\n"
        "}"
        : "+r"(x)
        : "r"(offset));
  }
  return x;
}

// Two rows of a tile: the bits of the lane's runs, and the bit of shared memory where the codes of each run
// begin. A row that is not `present` reads as empty.
template <int kCount>
struct RunPair {
  uint32_t bits[2][kCount];
  uint32_t start[2][kCount];
  CodeWindow window[2];
  bool few;  // the codes of every run of the warp fit a window

  __device__ __forceinline__ RunPair(uint32_t stage, const LaneRows& at, uint32_t bitmap_step,
                                     const bool (&present)[2]) {
    start[0][0] = stage * 8 + at.values;
    start[1][0] = start[0][0] + at.values_step;
    bool fit = true;
#pragma unroll
    for (int run = 0; run < kCount; ++run) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t own = load_shared(stage + at.bitmap + half * bitmap_step + 16 * run);
        bits[half][run] = present[half] ? own : 0u;
      }
      // Both rows share a register: counts of up to 128 fit a byte.
      const uint32_t own = __popc(bits[0][run]) + 256 * __popc(bits[1][run]);
      const uint32_t up_to = sum_in_row(own);
      const uint32_t before = up_to - own;
      fit = fit && ((own + 0x6f6fu) & 0x8080u) == 0;  // at most 16
      const uint32_t all = run + 1 < kCount ? __shfl_sync(0xffffffffu, up_to, 3, 4) : 0u;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t first = start[half][run];
        const uint32_t bits_per_code = half == 0 ? 4u : 4u << 8;
        start[half][run] = __dp4a(before, bits_per_code, first);
        if (run + 1 < kCount) {
          start[half][run + 1] = __dp4a(all, bits_per_code, first);
        }
      }
    }
    few = __all_sync(0xffffffffu, fit);
  }
  // As in BytePair.
  __device__ __forceinline__ uint32_t own_bits(int half, int index, int) const {
    return bits[half][index];
  }
};

template <int kHeadDim, int kBits>
using RowPair = std::conditional_t<Runs<kHeadDim, kBits>::kLong, RunPair<Runs<kHeadDim, kBits>::kCount>,
                                   BytePair<kHeadDim / 32>>;

template <int kWords>
__device__ __forceinline__ constexpr bool fits_windows(const BytePair<kWords>&) {
  return false;
}
template <int kCount>
__device__ __forceinline__ bool fits_windows(const RunPair<kCount>& rows) {
  return rows.few;
}

// Four times the kept channels of groups kFirst to kGroup - 1 of a run.
template <int kFirst, int kGroup>
__device__ __forceinline__ uint32_t code_bits(uint32_t bits) {
  static_assert(kFirst == 0 || kGroup <= kFirst + 1);
  return kFirst == kGroup
             ? 0u
             : 4 * __popc(kFirst == 0 ? bits << (32 - 8 * kGroup) : bits >> (8 * kFirst) & 0xffu);
}

// As above. kFew: a window holds the codes of a run, and otherwise of two groups, which always fit.
template <int kBits, int kGroup, bool kUpper, bool kFew, int kCount>
__device__ __forceinline__ void expand_group(RunPair<kCount>& rows, const unsigned char* table,
                                             const LaneByte& lane, Expanded<kBits> (&codes)[2]) {
  static_assert(kBits == 4);
  constexpr int kInRun = kGroup % 4;
  constexpr int kFirst = kFew ? 0 : kInRun / 2 * 2;  // group of the window
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t bits = rows.bits[half][kGroup / 4];
    CodeWindow& window = rows.window[half];
    if constexpr (kInRun == kFirst) {
      window.load(rows.start[half][kGroup / 4] + code_bits<0, kFirst>(bits));
    }
    const Selectors s = load_selectors(bits, table, lane.copy, pick_of(kInRun));
    codes[half] =
        expand_nibbles<kUpper>(kInRun == kFirst ? window.low : window.at(code_bits<kFirst, kInRun>(bits)), s);
  }
}

}  // namespace htree::compressed_kv
