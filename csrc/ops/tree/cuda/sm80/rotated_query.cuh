// The query rows of one (token, kv head) as the B operand of S^T = K' q^T, rotated on from slot to slot.
//
// For candidate p of slot j = p / 16, R_p K_c = R_{16 j} K'_c (docs/semantics/tree_attention.md §1.4), so the
// scores of slot j take the query at position n - 1 - 16 j. The query is kept in fp32 and rotated back by 16
// positions per slot. Both halves of a rotated pair lie in one lane, and the factors for 16 positions are the
// same for all slots.
#pragma once

#include "device/mma.cuh"
#include "device/numeric.cuh"
#include "device/reduce.cuh"
#include "ops/tree/cuda/sm80/packed_layer.cuh"

namespace htree::tree_attention {

// The dim of the lower half that element i of a lane belongs to: B fragments have 16 dims, and a lane holds 4
// elements of each.
__device__ __forceinline__ int fragment_dim(int i, int lane) {
  return i / 4 * 16 + 2 * (lane % 4) + (i & 1) + 8 * (i >> 1 & 1);
}

// The query heads are kTiles tiles of 8. Column lane / 4 of tile i is query head 8 i + lane / 4
// of the kv head.
template <int kKeyDim, int kTiles>
struct RotatedQuery {
  static constexpr int kPairs = kKeyDim / 8;  // rotated pairs of a lane in one tile
  float low[kTiles][kPairs];
  float high[kTiles][kPairs];
  float cos_step[kPairs];
  float sin_step[kPairs];
  // For columns 2 * (lane % 4) and the next: undoes the power of two, times the scale of the scores.
  float unscale[kTiles][2];

  // `rows` is [G, K] with stride `head_stride`, `rope` the table [positions, K/2], `position` the row of it
  // to rotate by.
  template <typename T>
  __device__ __forceinline__ void load(const T* rows, int64_t head_stride, int group, float score_scale,
                                       const float2* rope, int64_t position) {
    load([&](int head, int dim) { return device::to_acc(rows[head * head_stride + dim]); }, group,
         score_scale, rope, position);
  }

  // The same with element(head, dim) in place of `rows`.
  template <typename Element>
  __device__ __forceinline__ void load(Element&& element, int group, float score_scale, const float2* rope,
                                       int64_t position) {
    constexpr int kHalf = kKeyDim / 2;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const float2 step = rope[16 * kHalf + fragment_dim(i, lane)];
      cos_step[i] = step.x;
      sin_step[i] = step.y;
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const int head = tile * 8 + lane / 4;
      float largest = 0.f;
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const int dim = fragment_dim(i, lane);
        low[tile][i] = head < group ? element(head, dim) : 0.f;
        high[tile][i] = head < group ? element(head, kHalf + dim) : 0.f;
        largest = fmaxf(largest, fmaxf(finite_magnitude(low[tile][i]), finite_magnitude(high[tile][i])));
      }
      largest = fmaxf(largest, __shfl_xor_sync(device::kFullMask, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(device::kFullMask, largest, 2));
      const PowerOfTwo power = half_range_scale(largest);
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const float2 rotation = rope[position * kHalf + fragment_dim(i, lane)];
        const float x = low[tile][i] * power.scale, y = high[tile][i] * power.scale;
        low[tile][i] = x * rotation.x - y * rotation.y;
        high[tile][i] = x * rotation.y + y * rotation.x;
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        unscale[tile][i] =
            __shfl_sync(device::kFullMask, power.inverse, (2 * (lane % 4) + i) * 4) * score_scale;
      }
    }
  }

  // Rotates the query back by 16 positions.
  __device__ __forceinline__ void step_back() {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const float x = low[tile][i], y = high[tile][i];
        low[tile][i] = x * cos_step[i] + y * sin_step[i];
        high[tile][i] = y * cos_step[i] - x * sin_step[i];
      }
    }
  }
};

// Addresses of a lane's rows for ldmatrix in a tile of 16 rows. `plain`: rows are the M side of an A operand.
// `transposed`: dims are the M side and rows are K.
template <int kDim>
struct TileAddress {
  int plain_row, plain_chunk, transposed_row, transposed_chunk;

  __device__ __forceinline__ TileAddress() {
    const int lane = threadIdx.x % 32;
    const int matrix = lane / 8;
    plain_row = (matrix & 1) * 8 + lane % 8;
    plain_chunk = matrix >> 1;
    transposed_row = (matrix >> 1) * 8 + lane % 8;
    transposed_chunk = matrix & 1;
  }
  // The 16 dims from 16 * step on.
  __device__ __forceinline__ uint32_t plain(int step) const {
    return chunk_offset<kDim>(plain_row, 2 * step + plain_chunk);
  }
  __device__ __forceinline__ uint32_t transposed(int step) const {
    return chunk_offset<kDim>(transposed_row, 2 * step + transposed_chunk);
  }
};

// Scores of the 16 children of a slot, in log2 units: s[tile][0..3] in the accumulator layout of mma_16x8x16,
// with children as rows and query heads as columns. `block` is the packed parent's address in shared memory.
template <int kKeyDim, int kTiles>
__device__ __forceinline__ void slot_scores(const RotatedQuery<kKeyDim, kTiles>& q,
                                            const TileAddress<kKeyDim>& at, uint32_t block,
                                            float (&s)[kTiles][4]) {
  constexpr int kSteps = kKeyDim / 16;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      s[tile][i] = 0.f;
    }
  }
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    uint32_t a[4];
    device::load_matrices(a, block + at.plain(step));
    constexpr int kLowSteps = kSteps / 2;
    const int i = step % kLowSteps * 4;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const float(&half)[kKeyDim / 8] = step < kLowSteps ? q.low[tile] : q.high[tile];
      device::mma_16x8x16<__half>(s[tile], a, device::pack_pair<__half>(half[i], half[i + 1]),
                                  device::pack_pair<__half>(half[i + 2], half[i + 3]));
    }
  }
  float row_scale[2];
  load_row_scales(block + kParentKeyBytes<kKeyDim>, row_scale);
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      s[tile][i] *= row_scale[i / 2];
      s[tile][i] *= q.unscale[tile][i & 1];
    }
  }
}

}  // namespace htree::tree_attention
