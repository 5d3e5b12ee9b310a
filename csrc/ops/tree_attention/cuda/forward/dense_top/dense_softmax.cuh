// What a thread of the top layer's masked softmax keeps: the running state of its two rows, and the mask of
// the token they belong to.
#pragma once

#include "ops/tree_attention/cuda/select/dense_scores.cuh"

namespace htree::tree_attention {

// Running softmax of two rows. The reference moves only when a score of the row exceeds it by kSlack powers
// of two; that depends on the row alone.
template <typename T, int kDim>
struct AttendState {
  static constexpr float kSlack = 8.f;
  static constexpr float kUnset = -1e38f;
  float reference[2] = {kUnset, kUnset};
  float largest[2] = {-INFINITY, -INFINITY};  // of this lane's columns
  float sum[2] = {0.f, 0.f};                  // of this lane's columns
  float factor[2];                            // what `out` has to be multiplied by, if `moved`
  bool moved;
  float out[kDim / 2];

  __device__ __forceinline__ static float row_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(device::kFullMask, x, 1));
    return fmaxf(x, __shfl_xor_sync(device::kFullMask, x, 2));
  }

  // Scores to weights; -inf marks what does not take part.
  __device__ __forceinline__ void weigh(float (&s)[64]) {
    float most[2][2] = {{-INFINITY, -INFINITY}, {-INFINITY, -INFINITY}};
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      most[i / 2 & 1][i & 1] = fmaxf(most[i / 2 & 1][i & 1], s[i]);
    }
    bool grows = false;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      most[row][0] = fmaxf(most[row][0], most[row][1]);
      largest[row] = fmaxf(largest[row], most[row][0]);
      grows |= most[row][0] > reference[row] + kSlack;
    }
    moved = __any_sync(device::kFullMask, grows);
    if (moved) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const float top = row_max(most[row][0]);
        const float next = top > reference[row] + kSlack ? top : reference[row];
        factor[row] = device::exp2_flushed(reference[row] - next);
        sum[row] *= factor[row];
        reference[row] = next;
      }
    }
    float even[2] = {sum[0], sum[1]}, odd[2] = {0.f, 0.f};
#pragma unroll
    for (int i = 0; i < 64; i += 2) {
      const int row = i / 2 & 1;
      s[i] = device::exp2_flushed(s[i] - reference[row]);
      s[i + 1] = device::exp2_flushed(s[i + 1] - reference[row]);
      even[row] += s[i];
      odd[row] += s[i + 1];
    }
    sum[0] = even[0] + odd[0];
    sum[1] = even[1] + odd[1];
  }
  __device__ __forceinline__ void rescale() {
    if (moved) {
#pragma unroll
      for (int i = 0; i < kDim / 2; ++i) {
        out[i] *= factor[i / 2 & 1];
      }
    }
  }
  // Relative to the row's true maximum, in every lane.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      sum[row] += __shfl_xor_sync(device::kFullMask, sum[row], 1);
      sum[row] += __shfl_xor_sync(device::kFullMask, sum[row], 2);
      largest[row] = row_max(largest[row]);
      const float scale =
          largest[row] == -INFINITY ? 1.f : device::exp2_flushed(reference[row] - largest[row]);
      sum[row] *= scale;
#pragma unroll
      for (int i = 2 * row; i < kDim / 2; i += 4) {
        out[i] *= scale;
        out[i + 1] *= scale;
      }
    }
  }
};

// The bits of the 128 candidates of a tile, moved so that bit 8 j % 32 + c of word j / 4 is that of this
// lane's column 8 j + 2 (lane % 4) + c.
struct TileMask {
  uint32_t words[4];

  __device__ __forceinline__ void load(const uint32_t* row, int tile) {
    const uint4 raw = __ldg(reinterpret_cast<const uint4*>(row) + tile);
    words[0] = raw.x;
    words[1] = raw.y;
    words[2] = raw.z;
    words[3] = raw.w;
  }
  // Candidates from `end` on are out, like those that are selected.
  __device__ __forceinline__ void cut(int end) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int first = end - 32 * i;
      words[i] |= first <= 0 ? 0xffffffffu : first < 32 ? 0xffffffffu << first : 0u;
    }
  }
  __device__ __forceinline__ void apply(float (&s)[64]) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      const uint32_t bits = words[word] >> (lane % 4 * 2);
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const bool out = bits >> (i / 4 * 8 + i % 2) & 1;
        s[16 * word + i] = out ? -INFINITY : s[16 * word + i];
      }
    }
  }
};

}  // namespace htree::tree_attention
