// Split-KV decode attention over compressed rows. docs/semantics/compressed_kv.md §4.6
//
// A block has up to eight query heads of one kv head and a split of its tokens. Its warps take tiles of 16
// tokens one after the other. K is the left-hand operand of the products that give scores, in which channels
// and tokens may come in any order. So lane (g, t) of a warp, g = lane / 4 and t = lane % 4, expands byte t
// of every 32-bit word of the bitmaps of two tokens, or word t of every four (Runs), and that is its part of
// the operand. movmatrix transposes the expanded values into the left-hand operand of the products with the
// weights. Scales multiply scores and weights, so quantised codes are never dequantised.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "device/mma.cuh"
#include "ops/compressed_kv/decode/expand.cuh"
#include "ops/compressed_kv/decode/query_fragments.cuh"
#include "ops/compressed_kv/decode/stage.cuh"

namespace htree::compressed_kv {

// kHeads: 4 or 8 query heads of a block.
template <int kHeadDim, int kKeyBits, int kValueBits, int kHeads, typename T>
struct DecodeTraits {
  static_assert(kHeadDim % 64 == 0 && kHeadDim <= kMostTileHeadDim);
  using Pair = T;  // the type of 16-bit values
  static constexpr int kD = kHeadDim;
  static constexpr int kK = kKeyBits;
  static constexpr int kV = kValueBits;
  static constexpr int kHeadPairs = kHeads / 4;  // heads of a lane: t and t + 4
  static constexpr bool kIntegerKeys = kKeyBits != 16;
  // Words of 32 channels of a row. Eight channels are called a group; which ones a lane has, Runs says.
  static constexpr int kGroups = kHeadDim / 32;
  static constexpr int kOwnWords = (kGroups + 3) / 4;  // words that hold the bits of a lane
  using KeyRuns = Runs<kHeadDim, kKeyBits>;
  using ValueRuns = Runs<kHeadDim, kValueBits>;
  using KeyRows = RowPair<kHeadDim, kKeyBits>;
  using ValueRows = RowPair<kHeadDim, kValueBits>;
  // More warps hide each other's latencies, as long as the registers suffice.
  static constexpr int kMaxWarps = kHeadDim == 256                                     ? 8
                                   : kHeadDim == 192                                   ? 12
                                   : kHeads == 4 && kKeyBits != 16 && kValueBits != 16 ? 20
                                                                                       : 16;
  static constexpr bool kTwoTables = kKeyBits != kValueBits;
  static constexpr int kTableBytes = (kTwoTables ? 2 : 1) * kSelectorBytes;
  // The weights of 8-bit and 4-bit values are fp16, whatever the query's type.
  using Weight = std::conditional_t<kValueBits == 16, T, __half>;
};

// c[16 x 8] += a[16 x 32] * b[32 x 8] on signed bytes.
__device__ __forceinline__ void mma_int8(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                         uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

template <typename Tr>
using Query = QueryFragments<Tr::kD, Tr::kHeadPairs, Tr::kIntegerKeys>;

// Calls step(integral constant) for 0 ... kCount - 1.
template <int kCount, int kFirst = 0, typename Step>
__device__ __forceinline__ void unrolled(Step&& step) {
  if constexpr (kFirst < kCount) {
    step(std::integral_constant<int, kFirst>{});
    unrolled<kCount, kFirst + 1>(step);
  }
}

// Scores of the lane's two tokens for heads t and t + 4, in units of log2, without the scales of the rows.
template <bool kFew, typename Tr>
__device__ __forceinline__ void score_tile(typename Tr::KeyRows& rows, const unsigned char* table,
                                           const LaneByte& lane, const Query<Tr>& q,
                                           float (&score)[2][Tr::kHeadPairs]) {
  if constexpr (Tr::kK == 16) {
    float sum[Tr::kHeadPairs][4] = {};
    unrolled<Tr::kGroups>([&](auto index) {
      constexpr int group = decltype(index)::value;
      Expanded<16> k[2];
      expand_group<16, group, false, false>(rows, table, lane, k);
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const uint32_t a[4] = {k[0].r[i], k[1].r[i], k[0].r[i + 1], k[1].r[i + 1]};
#pragma unroll
        for (int product = 0; product < Tr::kHeadPairs; ++product) {
          device::mma_16x8x16<typename Tr::Pair>(sum[product], a, q.b[product][group][i],
                                                 q.b[product][group][i + 1]);
        }
      }
    });
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < Tr::kHeadPairs; ++i) {
        score[half][i] = (sum[i][2 * half] + sum[i][2 * half + 1]) * q.factor[i];
      }
    }
  } else {
    int sum[Tr::kHeadPairs][4] = {};
    unrolled<Tr::kGroups>([&](auto index) {
      constexpr int group = decltype(index)::value;
      Expanded<Tr::kK> k[2];
      expand_group<Tr::kK, group, true, kFew>(rows, table, lane, k);
#pragma unroll
      for (int i = 0; i < Tr::kHeadPairs; ++i) {
        mma_int8(sum[i], k[0].r[0], k[1].r[0], k[0].r[1], k[1].r[1], q.b[i][group][0], q.b[i][group][1]);
      }
    });
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < Tr::kHeadPairs; ++i) {
        score[half][i] = static_cast<float>(sum[i][2 * half] * 256 + sum[i][2 * half + 1]) * q.factor[i];
      }
    }
  }
}

__device__ __forceinline__ __half2 as_half2(uint32_t x) {
  return *reinterpret_cast<const __half2*>(&x);
}
__device__ __forceinline__ uint32_t as_bits(__half2 x) {
  return *reinterpret_cast<const uint32_t*>(&x);
}

// Four transposed bytes as fp16: the even bytes and the odd bytes.
__device__ __forceinline__ void bytes_to_halves(uint32_t bytes, uint32_t& even, uint32_t& odd) {
  // 1024 + 128 + code: an integer in the mantissa, with its sign bit flipped.
  const __half2 bias = __float2half2_rn(-1152.0f);
  even = as_bits(__hadd2(as_half2(mask_flip(bytes, 0x00ff00ffu, 0x64806480u)), bias));
  odd = as_bits(__hadd2(as_half2(mask_flip(bytes >> 8, 0x00ff00ffu, 0x64806480u)), bias));
}

// The same for nibbles. h[i] and h[2 + i] hold the lower and the upper nibbles of the even (i = 0) or odd bytes.
__device__ __forceinline__ void nibbles_to_halves(uint32_t bytes, uint32_t (&h)[4]) {
  const __half2 bias = __float2half2_rn(-1032.0f);      // of 1024 + 8 + code
  const __half2 sixteenth = __float2half2_rn(0.0625f);  // an upper nibble counts sixteen times
  const __half2 upper_bias = __float2half2_rn(-72.0f);  // (1024 + 128) / 16
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t x = i == 0 ? bytes : bytes >> 8;
    h[i] = as_bits(__hadd2(as_half2(mask_flip(x, 0x000f000fu, 0x64086408u)), bias));
    h[2 + i] = as_bits(__hfma2(as_half2(mask_flip(x, 0x00f000f0u, 0x64806480u)), sixteenth, upper_bias));
  }
}

// Adds to acc[group * 2 + i][c]: c = 0, 1 are heads t and t + 4 of one channel, c = 2, 3 of another (channel_of).
template <bool kFew, typename Tr>
__device__ __forceinline__ void weigh_tile(typename Tr::ValueRows& rows, const unsigned char* table,
                                           const LaneByte& lane, uint32_t weight0, uint32_t weight1,
                                           float (&acc)[2 * Tr::kGroups][4]) {
  unrolled<Tr::kGroups>([&](auto index) {
    constexpr int group = decltype(index)::value;
    Expanded<Tr::kV> v[2];
    expand_group<Tr::kV, group, false, kFew>(rows, table, lane, v);
    uint32_t a[2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (Tr::kV == 4) {
        // Channels i and i + 4 share a byte during the transposition.
        uint32_t values[4];
        nibbles_to_halves(device::transpose_matrix(v[half].r[0] + v[half].r[1] * 16), values);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          a[i >> 1][2 * half + (i & 1)] = values[i];
        }
      } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if constexpr (Tr::kV == 16) {
            a[i][2 * half] = device::transpose_matrix(v[half].r[2 * i]);
            a[i][2 * half + 1] = device::transpose_matrix(v[half].r[2 * i + 1]);
          } else {
            bytes_to_halves(device::transpose_matrix(v[half].r[i]), a[i][2 * half], a[i][2 * half + 1]);
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      device::mma_16x8x16<typename Tr::Weight>(acc[2 * group + i], a[i], weight0, weight1);
    }
  });
}

// The channel of acc[index][c] in lane (g, t): column g of a transposed matrix is half g & 1 of the register
// of lane t = g >> 1.
template <typename Tr>
__device__ __forceinline__ int channel_of(int g, int index, int c) {
  const int base = Tr::ValueRuns::first_channel(index >> 1, g >> 1) + 4 * (index & 1);
  return Tr::kV == 16 ? base + 2 * (c >> 1) + (g & 1) : base + 2 * (g & 1) + (c >> 1);
}

}  // namespace htree::compressed_kv
