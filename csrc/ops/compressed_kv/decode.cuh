// Split-KV decode attention over compressed rows. docs/semantics.md §4.6.
//
// A block owns up to eight query heads of one kv head and a split of its tokens; its warps take tiles of 16
// tokens in turn. Lane (g, t) of a warp, g = lane / 4 and t = lane % 4, expands channels [t * D/4, (t + 1) *
// D/4) of the tokens g and g + 8: just what it holds of the left-hand operand of the score products, where K
// is that operand and the order of channels is free. Expanded values are transposed by movmatrix into the
// left-hand operand of the products with the weights. Scales multiply scores and weights, so quantised codes
// are never dequantised.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "device/mma.cuh"
#include "ops/compressed_kv/expand.cuh"
#include "ops/compressed_kv/query_fragments.cuh"
#include "ops/compressed_kv/stage.cuh"

namespace htree::compressed_kv {

// Weights are kept relative to a maximum that may fall behind the true one by this many powers of two, so
// that the sums are rescaled a few times per split only.
constexpr float kSlack = 8.0f;

// c[16 x 8] += a[16 x 32] * b[32 x 8] on signed bytes.
__device__ __forceinline__ void mma_int8(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                         uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float load_shared_half(uint32_t address) {
  uint16_t bits;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(bits) : "r"(address));
  return __half2float(__ushort_as_half(bits));
}

template <int kHeadDim, int kKeyBits, int kValueBits, typename T>
struct DecodeTraits {
  using Pair = T;  // of 16-bit values
  static constexpr int kD = kHeadDim;
  static constexpr int kK = kKeyBits;
  static constexpr int kV = kValueBits;
  static constexpr int kGroups = kHeadDim / 32;  // groups of eight channels of a lane
  static constexpr int kWords = kHeadDim == 256 ? 2 : 1;
  static constexpr int kMaxWarps = kHeadDim == 256 ? 8 : 16;
  static constexpr bool kTwoTables = (kKeyBits == 4) != (kValueBits == 4);
  static constexpr int kTableBytes = (kTwoTables ? 2 : 1) * kSelectorBytes;
  // Weights of 8 and 4-bit values are fp16, whatever the query is.
  using Weight = std::conditional_t<kValueBits == 16, T, __half>;
};

// The bitmap words of two rows (tokens g and g + 8) in this lane's channels, and where their codes start.
template <typename Tr>
struct RowPair {
  uint32_t word[2][Tr::kWords];
  uint32_t cursor[2];
};

// `before` is the misalignment of the first row of each part in its stage.
template <typename Tr>
__device__ __forceinline__ RowPair<Tr> load_row_pair(uint32_t bitmap, uint32_t values, int row_bytes,
                                                     int bits, int num_tokens, int lane) {
  const int g = lane >> 2;
  const int t = lane & 3;
  RowPair<Tr> rows;
  uint32_t counts = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = g + 8 * half;
    const uint32_t address = bitmap + row * (Tr::kD / 8) + t * (Tr::kD / 32);
#pragma unroll
    for (int i = 0; i < Tr::kWords; ++i) {
      uint32_t word = load_shared((address & ~3u) + 4 * i);
      if constexpr (Tr::kD == 64) {
        word = (word >> (16 * (t & 1))) & 0xffffu;
      }
      // Rows behind the last token hold whatever was there before.
      rows.word[half][i] = row < num_tokens ? word : 0u;
      counts += __popc(rows.word[half][i]) << (16 * half);
    }
  }
  // Exclusive sums over the lanes of a quad, both rows in one register.
  uint32_t sum = counts;
  uint32_t below = __shfl_up_sync(0xffffffffu, sum, 1, 4);
  sum += t >= 1 ? below : 0;
  below = __shfl_up_sync(0xffffffffu, sum, 2, 4);
  sum += t >= 2 ? below : 0;
  sum -= counts;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t rank = (sum >> (16 * half)) & 0xffffu;
    rows.cursor[half] = (values + (g + 8 * half) * row_bytes) * 8 + rank * bits;
  }
  return rows;
}

template <typename Tr>
__device__ __forceinline__ uint32_t byte_of(const RowPair<Tr>& rows, int half, int group) {
  return (rows.word[half][group >> 2] >> (8 * (group & 3))) & 0xffu;
}

// Scores of tokens g, g + 8 and heads t, t + 4 in units of log2, without the scales of the rows.
template <typename Tr>
__device__ __forceinline__ void score_tile(RowPair<Tr>& rows, uint32_t table, bool many_heads,
                                           const QueryFragments<Tr::kD, Tr::kK != 16>& q,
                                           float (&score)[2][2]) {
  if constexpr (Tr::kK == 16) {
    float sum[4] = {};
#pragma unroll
    for (int group = 0; group < Tr::kGroups; ++group) {
      const auto low = expand_byte<16>(byte_of(rows, 0, group), rows.cursor[0], table);
      const auto high = expand_byte<16>(byte_of(rows, 1, group), rows.cursor[1], table);
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const uint32_t a[4] = {low.r[i], high.r[i], low.r[i + 1], high.r[i + 1]};
        device::mma_16x8x16<typename Tr::Pair>(sum, a, q.b[0][group][i], q.b[0][group][i + 1]);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      score[i >> 1][i & 1] = sum[i] * q.factor[i & 1];
    }
  } else {
    int sum[2][4] = {};
    constexpr uint32_t kUnit = Tr::kK == 4 ? 2 : 1;  // 7-bit to 8-bit two's complement
#pragma unroll
    for (int group = 0; group < Tr::kGroups; ++group) {
      const auto low = expand_byte<Tr::kK>(byte_of(rows, 0, group), rows.cursor[0], table);
      const auto high = expand_byte<Tr::kK>(byte_of(rows, 1, group), rows.cursor[1], table);
      const uint32_t a[4] = {low.r[0] * kUnit, high.r[0] * kUnit, low.r[1] * kUnit, high.r[1] * kUnit};
      mma_int8(sum[0], a[0], a[1], a[2], a[3], q.b[0][group][0], q.b[0][group][1]);
      if (many_heads) {
        mma_int8(sum[1], a[0], a[1], a[2], a[3], q.b[1][group][0], q.b[1][group][1]);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        score[half][i] = static_cast<float>(sum[i][2 * half] * 256 + sum[i][2 * half + 1]) * q.factor[i];
      }
    }
  }
}

// Two halves of transposed bytes as fp16: the even and the odd bytes of the four.
template <int kBits>
__device__ __forceinline__ void bytes_to_halves(uint32_t bytes, uint32_t& even, uint32_t& odd) {
  // 1024 + 64 + 8 * code or 1024 + 128 + code: an integer in the mantissa, its sign bit flipped
  constexpr uint32_t kMagic = kBits == 4 ? 0x64406440u : 0x64806480u;
  const __half2 bias = __float2half2_rn(kBits == 4 ? -1088.0f : -1152.0f);
  const uint32_t low = (bytes & 0x00ff00ffu) ^ kMagic;
  const uint32_t high = ((bytes >> 8) & 0x00ff00ffu) ^ kMagic;
  const __half2 a = __hadd2(*reinterpret_cast<const __half2*>(&low), bias);
  const __half2 b = __hadd2(*reinterpret_cast<const __half2*>(&high), bias);
  even = *reinterpret_cast<const uint32_t*>(&a);
  odd = *reinterpret_cast<const uint32_t*>(&b);
}
// What a code counts in the products.
template <int kBits>
constexpr float kCodeUnit = kBits == 4 ? 0.125f : 1.0f;

// acc[group * 2 + i][c]: c = 0, 1 are heads t and t + 4 of one channel, c = 2, 3 of another (channel_of).
template <typename Tr>
__device__ __forceinline__ void weigh_tile(RowPair<Tr>& rows, uint32_t table, uint32_t weight0,
                                           uint32_t weight1, float (&acc)[2 * Tr::kGroups][4]) {
#pragma unroll
  for (int group = 0; group < Tr::kGroups; ++group) {
    const auto low = expand_byte<Tr::kV>(byte_of(rows, 0, group), rows.cursor[0], table);
    const auto high = expand_byte<Tr::kV>(byte_of(rows, 1, group), rows.cursor[1], table);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t a[4];
      if constexpr (Tr::kV == 16) {
        a[0] = device::transpose_matrix(low.r[2 * i]);
        a[1] = device::transpose_matrix(low.r[2 * i + 1]);
        a[2] = device::transpose_matrix(high.r[2 * i]);
        a[3] = device::transpose_matrix(high.r[2 * i + 1]);
      } else {
        bytes_to_halves<Tr::kV>(device::transpose_matrix(low.r[i]), a[0], a[1]);
        bytes_to_halves<Tr::kV>(device::transpose_matrix(high.r[i]), a[2], a[3]);
      }
      device::mma_16x8x16<typename Tr::Weight>(acc[2 * group + i], a, weight0, weight1);
    }
  }
}

// Channel of acc[index][c] in lane (g, t): column g of a transposed matrix is half g & 1 of the register of
// lane t = g >> 1.
template <typename Tr>
__device__ __forceinline__ int channel_of(int g, int index, int c) {
  const int base = (g >> 1) * (Tr::kD / 4) + 8 * (index >> 1) + 4 * (index & 1);
  return Tr::kV == 16 ? base + 2 * (c >> 1) + (g & 1) : base + 2 * (g & 1) + (c >> 1);
}

}  // namespace htree::compressed_kv
