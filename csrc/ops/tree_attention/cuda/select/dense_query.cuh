// Query rows of a block of the top layer, rotated once and kept in shared memory as fp16.
//
// The scale of the scores and log2(e) are folded in before the rounding. A row out of fp16's comfortable
// range takes a power of two and a factor that undoes it instead, as keys do (dense_tiles.cuh).
#pragma once

#include "device/hopper/tma.cuh"
#include "ops/tree_attention/cuda/query_row.cuh"
#include "ops/tree_attention/cuda/tree/dense_tiles.cuh"

namespace htree::tree_attention {

struct QueryRow {
  const void* data;  // [K]
  int64_t position;
};

// kThreads threads, numbered by `thread`. row_of(i) gives the source of row i of `tile` (kRows rows in
// panels) and the position it is rotated to. Returns whether some factor of this thread's rows is not 1. A
// barrier of these threads has to follow, and then the rows are visible to wgmma.
template <typename T, int kDim, int kRows, int kThreads, int kAhead, typename RowOf>
__device__ __forceinline__ bool rotate_queries(char* tile, float* factors, const GatherParams& p, int thread,
                                               RowOf row_of) {
  constexpr int kHalf = kDim / 2;
  constexpr int kTasks = kDim / 16;  // threads of a row: 8 dims of the lower half and their partners
  constexpr int kRounds = (kRows * kTasks + kThreads - 1) / kThreads;
  static_assert(kRows * kTasks % 32 == 0 && kThreads % 32 == 0);  // warps run whole or not at all
  uint4 low_raw[kAhead], high_raw[kAhead];
  float4 rotations[kAhead][4];  // cos, sin of two dims each
  const auto load = [&](int round) {
    const int task = thread + round * kThreads;
    if (task < kRows * kTasks) {
      const QueryRow source = row_of(task / kTasks);
      const int chunk = task % kTasks;
      const T* from = static_cast<const T*>(source.data) + chunk * 8;
      low_raw[round % kAhead] = load_eight(from, p.queries.aligned);
      high_raw[round % kAhead] = load_eight(from + kHalf, p.queries.aligned);
      const float4* rotation = reinterpret_cast<const float4*>(p.rope + source.position * kHalf + chunk * 8);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        rotations[round % kAhead][i] = __ldg(rotation + i);
      }
    }
  };
#pragma unroll
  for (int round = 0; round < kAhead; ++round) {
    load(round);
  }
  bool scaled = false;
#pragma unroll
  for (int round = 0; round < kRounds; ++round) {
    const int task = thread + round * kThreads;
    if (task >= kRows * kTasks) {
      break;
    }
    const int row = task / kTasks, chunk = task % kTasks;
    float low[8], high[8];
    widen_eight<T>(low_raw[round % kAhead], low);
    widen_eight<T>(high_raw[round % kAhead], high);
    const float largest = row_magnitude<kTasks>(low, high);
    const bool plain = fits_half(largest, p.score_scale);
    const PowerOfTwo power = half_range_scale(largest);
    const float scale = plain ? p.score_scale : power.scale;
    if (chunk == 0) {
      factors[row] = plain ? 1.f : power.inverse * p.score_scale;
    }
    scaled |= !plain;
    uint4 rotated_low, rotated_high;
    rotate_eight(low, high, scale, rotations[round % kAhead], rotated_low, rotated_high);
    *reinterpret_cast<uint4*>(tile + panel_offset(kRows, row, chunk)) = rotated_low;
    *reinterpret_cast<uint4*>(tile + panel_offset(kRows, row, kHalf / 8 + chunk)) = rotated_high;
    if (round + kAhead < kRounds) {
      load(round + kAhead);
    }
  }
  device::fence_async_shared();
  return scaled;
}

// Row of the query head `head` of a kv head, rotated to `position`; `query` counts from the first of the
// chunk.
template <typename T>
__device__ __forceinline__ QueryRow query_row(const GatherParams& p, int64_t batch, int kv_head,
                                              int64_t query, int head, int position) {
  const T* data = static_cast<const T*>(p.queries.data) + batch * p.queries.batch + query * p.queries.row +
                  int64_t{kv_head * p.group + head} * p.queries.head;
  return {data, position};
}

}  // namespace htree::tree_attention
