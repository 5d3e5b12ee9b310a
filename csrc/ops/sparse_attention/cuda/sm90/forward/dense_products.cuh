// What the dense products of dense_top/ and dense_rows/ share: the running softmax of a thread, for warpgroups of 64
// query rows each. sm_90a.
#pragma once

#include "ops/selection/cuda/sm90/dense_scores.cuh"
#include "ops/sparse_attention/cuda/attend.h"

namespace htree::tree_attention {

// The sums of two rows.
struct RowSums {
  static constexpr float kUnset = -1e38f;
  float reference[2] = {kUnset, kUnset};
  float largest[2] = {-INFINITY, -INFINITY};  // of this lane's columns
  float sum[2] = {0.f, 0.f};                  // of this lane's columns
};

// Running softmax of two rows. A row's reference moves only when a score of the row exceeds it by kSlack
// powers of two, so it depends on that row alone.
template <typename T, int kDim>
struct AttendState : RowSums {
  static constexpr float kSlack = 8.f;
  float factor[2];  // what `out` has to be multiplied by where `moved` holds
  bool moved;
  float out[kDim / 2];

  __device__ __forceinline__ void clear_out() {
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) {
      out[i] = 0.f;
    }
  }

  __device__ __forceinline__ static float row_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(device::kFullMask, x, 1));
    return fmaxf(x, __shfl_xor_sync(device::kFullMask, x, 2));
  }

  // Replaces scores by weights; -inf marks what does not take part.
  __device__ __forceinline__ void weigh(float (&s)[64]) {
    float most[2][2] = {{-INFINITY, -INFINITY}, {-INFINITY, -INFINITY}};
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      most[i / 2 & 1][i & 1] = fmaxf(most[i / 2 & 1][i & 1], s[i]);
    }
    move_references(most);
    add_weights(s, [&](int i) { return reference[i / 2 & 1]; });
  }
  // The same where columns 16 p ... 16 p + 15, elements 8 p ... 8 p + 7, take part only if bit p of the row's marks is
  // set. Others have no part in the maximum, and an infinite reference makes their weights 0. That costs less than to make
  // their scores -inf, and fails only where a score is not finite. Then the mean of its parent is not finite either, which
  // is what the row sees of that parent.
  __device__ __forceinline__ void weigh(float (&s)[64], const int (&marks)[2]) {
    const auto marked = [&](int i) { return (marks[i / 2 & 1] & 1 << i / 8) != 0; };
    float most[2][2] = {{-INFINITY, -INFINITY}, {-INFINITY, -INFINITY}};
#pragma unroll
    for (int p = 0; p < 64; p += 8) {
#pragma unroll
      for (int i = p; i < p + 4; i += 2) {
        float(&of)[2] = most[i / 2 & 1];
        if (marked(i)) {
          of[0] = fmaxf(fmaxf(of[0], s[i]), s[i + 4]);
          of[1] = fmaxf(fmaxf(of[1], s[i + 1]), s[i + 5]);
        }
      }
    }
    move_references(most);
    add_weights(s, [&](int i) { return marked(i) ? reference[i / 2 & 1] : INFINITY; });
  }

  // Moves the references of rows whose largest new scores, `most` of even and of odd columns, exceed them by far.
  __device__ __forceinline__ void move_references(float (&most)[2][2]) {
    bool grows = false;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      most[row][0] = fmaxf(most[row][0], most[row][1]);
      largest[row] = fmaxf(largest[row], most[row][0]);
      grows |= most[row][0] > most_below(row);
    }
    moved = __any_sync(device::kFullMask, grows);
    if (moved) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const float top = row_max(most[row][0]);
        const float next = top > most_below(row) ? top : reference[row];
        factor[row] = device::exp2_flushed(reference[row] - next);
        sum[row] *= factor[row];
        reference[row] = next;
      }
    }
  }
  // The largest score that leaves the reference of a row where it is. Rounded down: where floats lie 16 apart, rounding up
  // would leave a weight of 2^16, beyond fp16.
  __device__ __forceinline__ float most_below(int row) const {
    return __fadd_rd(reference[row], kSlack);
  }
  // from(i) is the reference of element i.
  template <typename From>
  __device__ __forceinline__ void add_weights(float (&s)[64], From from) {
    float even[2] = {sum[0], sum[1]}, odd[2] = {0.f, 0.f};
#pragma unroll
    for (int i = 0; i < 64; i += 2) {
      const int row = i / 2 & 1;
      s[i] = device::exp2_flushed(s[i] - from(i));
      s[i + 1] = device::exp2_flushed(s[i + 1] - from(i + 1));
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
  // Brings the sums to the row's true maximum, in every lane.
  __device__ __forceinline__ void finish() {
    finish(*this);
  }
  // The same for rows whose sums are no longer those of the state, while `out` still is theirs.
  __device__ __forceinline__ void finish(RowSums& rows) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      rows.sum[row] += __shfl_xor_sync(device::kFullMask, rows.sum[row], 1);
      rows.sum[row] += __shfl_xor_sync(device::kFullMask, rows.sum[row], 2);
      rows.largest[row] = row_max(rows.largest[row]);
      const float scale = rows.largest[row] == -INFINITY
                              ? 1.f
                              : device::exp2_flushed(rows.reference[row] - rows.largest[row]);
      rows.sum[row] *= scale;
#pragma unroll
      for (int i = 2 * row; i < kDim / 2; i += 4) {
        out[i] *= scale;
        out[i + 1] *= scale;
      }
    }
  }
};

constexpr int kConsumerBarrier = 1;  // of all consumer threads
// Where one warpgroup does nothing but start copies.
constexpr int kCopyRegisters = 24, kConsumeRegisters = 240;
static_assert(128 * kCopyRegisters + 256 * kConsumeRegisters <= 65536);

}  // namespace htree::tree_attention
