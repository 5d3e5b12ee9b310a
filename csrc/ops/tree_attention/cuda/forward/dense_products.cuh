// What the dense products of dense_top/ and dense_rows/ share: the running softmax of a thread, and the ring of tiles that
// one thread fills while warpgroups of 64 query rows each multiply. sm_90a.
#pragma once

#include "ops/tree_attention/cuda/forward/attend.h"
#include "ops/tree_attention/cuda/select/dense_scores.cuh"

namespace htree::tree_attention {

// Running softmax of two rows. A row's reference moves only when a score of the row exceeds it by kSlack
// powers of two, so it depends on that row alone.
template <typename T, int kDim>
struct AttendState {
  static constexpr float kSlack = 8.f;
  static constexpr float kUnset = -1e38f;
  float reference[2] = {kUnset, kUnset};
  float largest[2] = {-INFINITY, -INFINITY};  // of this lane's columns
  float sum[2] = {0.f, 0.f};                  // of this lane's columns
  float factor[2];                            // what `out` has to be multiplied by where `moved` holds
  bool moved;
  float out[kDim / 2];

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
  // Brings the sums to the row's true maximum, in every lane.
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

constexpr int kTopAttendStages = 3;
constexpr int kConsumerBarrier = 1;
constexpr int kCopyRegisters = 24, kConsumeRegisters = 240;
static_assert(128 * kCopyRegisters + 256 * kConsumeRegisters <= 65536);

template <int kDim, int kGroups>
struct AttendShared {
  static constexpr int kRows = 64 * kGroups;
  char queries[kPanels<kDim> * kRows * kPanelRowBytes];
  char keys[kTopAttendStages][kTopTileBytes<kDim>];
  char values[kTopAttendStages][kTopTileBytes<kDim>];
  float factors[kRows];
  device::Barrier key_full[kTopAttendStages], key_empty[kTopAttendStages];
  device::Barrier value_full[kTopAttendStages], value_empty[kTopAttendStages];
};
template <int kDim, int kGroups>
constexpr int kAttendSharedBytes = sizeof(AttendShared<kDim, kGroups>) + 1024;
static_assert(kAttendSharedBytes<128, 2> <= device::kHopperSharedBytes);

// All threads of the block call.
template <int kDim, int kGroups>
__device__ __forceinline__ void init_rings(AttendShared<kDim, kGroups>& shared) {
  if (threadIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < kTopAttendStages; ++i) {
      device::barrier_init(&shared.key_full[i], 1);
      device::barrier_init(&shared.key_empty[i], 4 * kGroups);
      device::barrier_init(&shared.value_full[i], 1);
      device::barrier_init(&shared.value_empty[i], 4 * kGroups);
    }
    device::fence_barrier_init();
  }
  __syncthreads();
}

// The copies, made by one thread of their warpgroup.
template <int kDim, int kGroups>
__device__ __forceinline__ void copy_tiles(AttendShared<kDim, kGroups>& shared, const char* keys,
                                           const char* values, int num_tiles) {
  for (int tile = 0; tile < num_tiles; ++tile) {
    const int stage = tile % kTopAttendStages;
    const uint32_t parity = (tile / kTopAttendStages - 1) & 1;
    if (tile >= kTopAttendStages) {
      device::barrier_wait(&shared.key_empty[stage], parity);
    }
    device::barrier_arrive_expect(&shared.key_full[stage], kTopTileBytes<kDim>);
    device::bulk_load(shared.keys[stage], keys + int64_t{tile} * kTopTileBytes<kDim>, kTopTileBytes<kDim>,
                      &shared.key_full[stage]);
    if (tile >= kTopAttendStages) {
      device::barrier_wait(&shared.value_empty[stage], parity);
    }
    device::barrier_arrive_expect(&shared.value_full[stage], kTopTileBytes<kDim>);
    device::bulk_load(shared.values[stage], values + int64_t{tile} * kTopTileBytes<kDim>, kTopTileBytes<kDim>,
                      &shared.value_full[stage]);
  }
}

}  // namespace htree::tree_attention
