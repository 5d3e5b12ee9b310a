// Query rows of a block of the top layer, rotated once and kept in shared memory as fp16.
//
// The scale of the scores and log2(e) are folded in before the rounding. A row out of fp16's comfortable
// range takes a power of two and a factor that undoes it instead, as keys do (top_tiles.cuh).
#pragma once

#include "device/numeric.cuh"
#include "device/reduce.cuh"
#include "device/tma.cuh"
#include "ops/tree_attention/attention/top/top_tiles.cuh"

namespace htree::tree_attention {

// 8 consecutive elements as they are stored; one load where the rows are aligned to 16 bytes.
template <typename T>
__device__ __forceinline__ uint4 load_eight(const T* from, bool vector_loads) {
  if (vector_loads) {
    return __ldg(reinterpret_cast<const uint4*>(from));
  }
  const uint16_t* x = reinterpret_cast<const uint16_t*>(from);
  return make_uint4(x[0] | uint32_t{x[1]} << 16, x[2] | uint32_t{x[3]} << 16, x[4] | uint32_t{x[5]} << 16,
                    x[6] | uint32_t{x[7]} << 16);
}
template <typename T>
__device__ __forceinline__ void widen_eight(const uint4& raw, float (&x)[8]) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    x[i] = device::to_acc(reinterpret_cast<const T*>(words)[i]);
  }
}

struct QueryRow {
  const void* data;  // [K]
  int64_t position;
};

// kThreads threads, numbered by `thread`. row_of(i) gives the source of row i of `tile` (kRows rows in
// panels) and the position it is rotated to. Returns whether some factor of this thread's rows is not 1. A
// barrier of these threads has to follow, and then the rows are visible to wgmma.
template <typename T, int kDim, int kRows, int kThreads, int kAhead, typename RowOf>
__device__ __forceinline__ bool rotate_queries(char* tile, float* factors, const GatherParams& p,
                                               bool vector_loads, int thread, RowOf row_of) {
  constexpr int kHalf = kDim / 2;
  constexpr int kTasks = kDim / 16;  // threads of a row: 8 dims of the lower half and their partners
  constexpr int kRounds = (kRows * kTasks + kThreads - 1) / kThreads;
  static_assert(kRows * kTasks % 32 == 0 && kThreads % 32 == 0);  // warps run whole or not at all
  uint4 low_raw[kAhead], high_raw[kAhead];
  float4 turns[kAhead][4];  // cos, sin of two dims each
  const auto load = [&](int round) {
    const int task = thread + round * kThreads;
    if (task < kRows * kTasks) {
      const QueryRow source = row_of(task / kTasks);
      const int chunk = task % kTasks;
      const T* from = static_cast<const T*>(source.data) + chunk * 8;
      low_raw[round % kAhead] = load_eight(from, vector_loads);
      high_raw[round % kAhead] = load_eight(from + kHalf, vector_loads);
      const float4* turn = reinterpret_cast<const float4*>(p.rope + source.position * kHalf + chunk * 8);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        turns[round % kAhead][i] = __ldg(turn + i);
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
    float largest = 0.f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      largest = fmaxf(largest, fmaxf(finite_magnitude(low[i]), finite_magnitude(high[i])));
    }
#pragma unroll
    for (int offset = 1; offset < kTasks; offset *= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
    }
    const bool plain = plain_range(largest, p.score_scale);
    const PowerOfTwo power = half_range_scale(largest);
    const float scale = plain ? p.score_scale : power.scale;
    if (chunk == 0) {
      factors[row] = plain ? 1.f : power.inverse * p.score_scale;
    }
    scaled |= !plain;
    uint32_t first[4], second[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 turn = turns[round % kAhead][i];
      const float x0 = low[2 * i] * scale, y0 = high[2 * i] * scale;
      const float x1 = low[2 * i + 1] * scale, y1 = high[2 * i + 1] * scale;
      first[i] = device::pack_pair<__half>(x0 * turn.x - y0 * turn.y, x1 * turn.z - y1 * turn.w);
      second[i] = device::pack_pair<__half>(x0 * turn.y + y0 * turn.x, x1 * turn.w + y1 * turn.z);
    }
    *reinterpret_cast<uint4*>(tile + panel_offset(kRows, row, chunk)) =
        make_uint4(first[0], first[1], first[2], first[3]);
    *reinterpret_cast<uint4*>(tile + panel_offset(kRows, row, kHalf / 8 + chunk)) =
        make_uint4(second[0], second[1], second[2], second[3]);
    if (round + kAhead < kRounds) {
      load(round + kAhead);
    }
  }
  device::fence_async_shared();
  return scaled;
}

// Row of the query head `head` of a kv head, turned to `position`; `query` counts from the first of the
// chunk.
template <typename T>
__device__ __forceinline__ QueryRow query_row(const GatherParams& p, int64_t batch, int kv_head,
                                              int64_t query, int head, int position) {
  const T* data = static_cast<const T*>(p.queries.data) + batch * p.queries.batch + query * p.queries.row +
                  int64_t{kv_head * p.group + head} * p.queries.head;
  return {data, position};
}

}  // namespace htree::tree_attention
