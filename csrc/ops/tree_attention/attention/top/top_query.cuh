// Query rows of a block of the top layer, rotated once and kept in shared memory as fp16.
//
// The scale of the scores and log2(e) are folded in before the rounding. A row out of fp16's comfortable range
// takes a power of two and a factor that undoes it instead, as keys do (top_tiles.cuh).
#pragma once

#include "device/numeric.cuh"
#include "device/reduce.cuh"
#include "device/tma.cuh"
#include "ops/tree_attention/attention/top/top_tiles.cuh"

namespace htree::tree_attention {

// 8 consecutive elements; one load where the rows are aligned to 16 bytes.
template <typename T>
__device__ __forceinline__ void load_eight(const T* from, bool vector_loads, float (&x)[8]) {
  T raw[8];
  if (vector_loads) {
    *reinterpret_cast<uint4*>(raw) = __ldg(reinterpret_cast<const uint4*>(from));
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      raw[i] = from[i];
    }
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    x[i] = device::to_acc(raw[i]);
  }
}

// All kThreads threads of the block. row_of(i) gives the source of row i of `tile` (kRows rows in panels) and
// the position it is rotated to. Returns, to every thread, whether some factor in `factors` [kRows] is not 1.
// Ends with a barrier; the rows are visible to wgmma.
template <typename T, int kDim, int kRows, int kThreads, typename RowOf>
__device__ __forceinline__ bool rotate_queries(char* tile, float* factors, const GatherParams& p,
                                               bool vector_loads, RowOf row_of) {
  constexpr int kHalf = kDim / 2;
  constexpr int kTasks = kDim / 16;  // threads of a row: 8 dims of the lower half and their partners
  static_assert(kRows * kTasks % 32 == 0 && kThreads % 32 == 0);  // warps run whole or not at all
  bool scaled = false;
#pragma unroll 2
  for (int task = threadIdx.x; task < kRows * kTasks; task += kThreads) {
    const int row = task / kTasks, chunk = task % kTasks;
    const auto source = row_of(row);
    const T* from = static_cast<const T*>(source.data) + chunk * 8;
    float low[8], high[8];
    load_eight(from, vector_loads, low);
    load_eight(from + kHalf, vector_loads, high);
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
    const float4* turns = reinterpret_cast<const float4*>(p.rope + source.position * kHalf + chunk * 8);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 turn = __ldg(turns + i);  // cos, sin of dims 2 i and 2 i + 1
      const float x0 = low[2 * i] * scale, y0 = high[2 * i] * scale;
      const float x1 = low[2 * i + 1] * scale, y1 = high[2 * i + 1] * scale;
      first[i] = device::pack_pair<__half>(x0 * turn.x - y0 * turn.y, x1 * turn.z - y1 * turn.w);
      second[i] = device::pack_pair<__half>(x0 * turn.y + y0 * turn.x, x1 * turn.w + y1 * turn.z);
    }
    *reinterpret_cast<uint4*>(tile + panel_offset(kRows, row, chunk)) =
        make_uint4(first[0], first[1], first[2], first[3]);
    *reinterpret_cast<uint4*>(tile + panel_offset(kRows, row, kHalf / 8 + chunk)) =
        make_uint4(second[0], second[1], second[2], second[3]);
  }
  device::fence_async_shared();
  return __syncthreads_or(scaled);
}

struct QueryRow {
  const void* data;  // [K]
  int64_t position;
};

// Row of the query head `head` of a kv head; `query` counts from the first of the chunk.
template <typename T>
__device__ __forceinline__ QueryRow query_row(const GatherParams& p, int64_t batch, int64_t kv_head,
                                              int64_t query, int head) {
  const T* data = static_cast<const T*>(p.queries.data) + batch * p.queries.batch + query * p.queries.row +
                  (kv_head * p.group + head) * p.queries.head;
  return {data, (p.t0 + query) / p.node_span};
}

}  // namespace htree::tree_attention
