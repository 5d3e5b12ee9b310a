// The query rows of one (token, kv head) in fp16 as the B operand of S^T = K' q^T, rotated afresh for every
// slot: docs/semantics/tree_attention.md §1.4.
//
// RotatedQuery rotates the query on from slot to slot in fp32. Here each slot starts from the same rounded
// R_{n-1} q and rotates it back by 16 j positions with factors from a table, two elements per instruction.
// That takes a third of the registers, so that 16 warps fit an SM, and half the instructions.
#pragma once

#include "ops/tree/cuda/sm80/rotated_query.cuh"

namespace htree::tree_attention {

// The table: cos and sin of 16 j theta for slot j, [slots][cos, sin][4 lanes of a quad][K/16] pairs of fp16.
// Pair i of a lane belongs to the dims of elements 2i and 2i + 1 of fragment_dim().
template <int kKeyDim>
struct RotationSlots {
  static constexpr int kPairs = kKeyDim / 16;
  static constexpr int kSlotPairs = 8 * kPairs;
};

template <int kKeyDim>
struct RotationFactors {
  static constexpr int kPairs = RotationSlots<kKeyDim>::kPairs;
  uint32_t cos[kPairs], sin[kPairs];

  __device__ __forceinline__ static int lane_offset() { return threadIdx.x % 4 * kPairs; }

  // `at`: the start of a slot in the table, plus lane_offset().
  __device__ __forceinline__ void load(const __half2* at) {
    read(cos, at);
    read(sin, at + 4 * kPairs);
  }

 private:
  __device__ __forceinline__ static void read(uint32_t (&to)[kPairs], const __half2* from) {
    if constexpr (kPairs % 4 == 0) {
#pragma unroll
      for (int i = 0; i < kPairs; i += 4) {
        const uint4 four = __ldg(reinterpret_cast<const uint4*>(from + i));
        to[i] = four.x;
        to[i + 1] = four.y;
        to[i + 2] = four.z;
        to[i + 3] = four.w;
      }
    } else {
      static_assert(kPairs == 2);
      const uint2 two = __ldg(reinterpret_cast<const uint2*>(from));
      to[0] = two.x;
      to[1] = two.y;
    }
  }
};

// As TileAddress, with the sums done beforehand: the swizzle repeats every 64 dims, so four
// registers serve all steps.
template <int kDim>
struct StepOffsets {
  static constexpr int kSteps = kDim / 16 < 4 ? kDim / 16 : 4;
  uint32_t plain[kSteps], transposed[kSteps];

  __device__ __forceinline__ StepOffsets() {
    const TileAddress<kDim> at;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      plain[step] = at.plain(step);
      transposed[step] = at.transposed(step);
    }
  }
  // Bytes from the one of those four steps to step `step`.
  __device__ __forceinline__ static constexpr int further(int step) {
    return chunk_offset<kDim>(0, step / kSteps * kSteps * 2);
  }
};

template <int kKeyDim, int kTiles>
struct RotatedHalfQuery {
  static constexpr int kPairs = RotationSlots<kKeyDim>::kPairs;
  uint32_t low[kTiles][kPairs], high[kTiles][kPairs];  // R_{n-1} q
  float unscale[kTiles][2];                            // as in RotatedQuery

  // Takes the arguments of RotatedQuery::load.
  template <typename... Args>
  __device__ __forceinline__ void load(Args&&... args) {
    RotatedQuery<kKeyDim, kTiles> q;
    q.load(args...);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        low[tile][i] = device::pack_pair<__half>(q.low[tile][2 * i], q.low[tile][2 * i + 1]);
        high[tile][i] = device::pack_pair<__half>(q.high[tile][2 * i], q.high[tile][2 * i + 1]);
      }
      unscale[tile][0] = q.unscale[tile][0];
      unscale[tile][1] = q.unscale[tile][1];
    }
  }

  // Scores of the 16 children of a slot in log2 units, laid out as in slot_scores(), for the query rotated
  // `by` the factors of the slot, where it is. Even and odd steps have an accumulator each, which halves the latency.
  template <bool kRotates>
  __device__ __forceinline__ void scores(const RotationFactors<kKeyDim>& by, const StepOffsets<kKeyDim>& at,
                                         uint32_t block, float (&s)[kTiles][4]) const {
    constexpr int kSteps = kKeyDim / 16, kLowSteps = kSteps / 2;
    uint32_t rotated_low[kTiles][kPairs], rotated_high[kTiles][kPairs];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        rotated_low[tile][i] = low[tile][i];
        rotated_high[tile][i] = high[tile][i];
        if constexpr (kRotates) {
          const __half2 x = as_half2(low[tile][i]), y = as_half2(high[tile][i]);
          const __half2 c = as_half2(by.cos[i]), s = as_half2(by.sin[i]);
          rotated_low[tile][i] = as_bits(__hfma2(x, c, __hmul2(y, s)));
          rotated_high[tile][i] = as_bits(__hfma2(y, c, __hneg2(__hmul2(x, s))));
        }
      }
    }
    float odd[kTiles][4];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s[tile][i] = odd[tile][i] = 0.f;
      }
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t a[4];
      device::load_matrices(a, block + at.plain[step % at.kSteps] + at.further(step));
      const int i = step % kLowSteps * 2;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const uint32_t(&half)[kPairs] = step < kLowSteps ? rotated_low[tile] : rotated_high[tile];
        device::mma_16x8x16<__half>(step % 2 == 0 ? s[tile] : odd[tile], a, half[i], half[i + 1]);
      }
    }
    float row_scale[2];
    load_row_scales(block + kParentKeyBytes<kKeyDim>, row_scale);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        s[tile][i] = (s[tile][i] + odd[tile][i]) * row_scale[i / 2] * unscale[tile][i & 1];
      }
    }
  }

 private:
  __device__ __forceinline__ static __half2 as_half2(uint32_t bits) {
    return *reinterpret_cast<const __half2*>(&bits);
  }
  __device__ __forceinline__ static uint32_t as_bits(__half2 pair) {
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
};

}  // namespace htree::tree_attention
