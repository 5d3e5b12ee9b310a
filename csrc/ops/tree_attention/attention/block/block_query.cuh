// Query rows of a selection block in shared memory as the A operand of S = Q K'^T, and where a row belongs.
#pragma once

#include "device/mma.cuh"
#include "device/numeric.cuh"
#include "device/tma.cuh"
#include "ops/tree_attention/attention/block/block_task.cuh"

namespace htree::tree_attention {

// One (query, head) pair of a block.
struct BlockRow {
  bool exists;
  int query;  // in the chunk
  int head;   // of the kv head's group

  template <typename Tile>
  __device__ __forceinline__ static BlockRow of(const GatherParams& p, const BlockTask& task, int row) {
    const int pair = task.row_tile * Tile::kRows + row;
    const int local = pair / p.group;
    return {local < task.num_queries, task.first_query + local, pair - local * p.group};
  }
};

// 8 elements; rows of a view may start anywhere.
template <typename T>
__device__ __forceinline__ void load_8(const T* from, float (&x)[8]) {
  alignas(16) T raw[8];
  if (reinterpret_cast<uintptr_t>(from) % 16 == 0) {
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

// Rows [first_row, first_row + kCount) of the block, turned to position n - 1 of their query, in fp16 with a
// power of two per row; 128 threads call, `thread` in 0 ... 127. The sign of the scale goes with the queries,
// its size into shared.unscale.
template <typename T, typename Tile, int kCount>
__device__ __forceinline__ void load_query_rows(const GatherParams& p, const BlockTask& task,
                                                BlockShared<Tile>& shared, int first_row, int thread) {
  constexpr int kHalf = Tile::kKeyDim / 2;
  constexpr int kLanes = kHalf / 8;  // of one row: 8 dims of the lower half and their partners each
  constexpr int kRowsPerPass = 128 / kLanes;
  const int batch = task.head_index / p.num_kv_heads, kv_head = task.head_index % p.num_kv_heads;
  const T* head_rows = static_cast<const T*>(p.queries.data) + batch * p.queries.batch +
                       static_cast<int64_t>(kv_head) * p.group * p.queries.head;
  const int dim = thread % kLanes * 8;
  const float sign = p.score_scale < 0.f ? -1.f : 1.f;
#pragma unroll 1
  for (int pass = 0; pass < (kCount + kRowsPerPass - 1) / kRowsPerPass; ++pass) {
    const int row_idx = pass * kRowsPerPass + thread / kLanes;
    const bool wanted = kCount % kRowsPerPass == 0 || row_idx < kCount;
    const int row = first_row + row_idx;
    const BlockRow at = BlockRow::of<Tile>(p, task, row);
    float x[8] = {}, y[8] = {}, largest = 0.f;
    int position = 0;
    if (wanted && at.exists) {
      const T* from = head_rows + at.query * p.queries.row + at.head * p.queries.head + dim;
      load_8(from, x);
      load_8(from + kHalf, y);
      const int64_t rightmost = (p.t0 + at.query) / p.node_span;
      position = (task.num_slots - 1) * kBlockRows + static_cast<int>(rightmost % kBlockRows);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      largest = fmaxf(largest, fmaxf(finite_magnitude(x[i]), finite_magnitude(y[i])));
    }
#pragma unroll
    for (int offset = 1; offset < kLanes; offset *= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
    }
    const PowerOfTwo power = half_range_scale(largest);
    const float scale = power.scale * sign;
    const float2* turns = p.rope + static_cast<int64_t>(position) * kHalf + dim;
    uint4 low, high;
    uint32_t* lows = reinterpret_cast<uint32_t*>(&low);
    uint32_t* highs = reinterpret_cast<uint32_t*>(&high);
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      const float4 turn = __ldg(reinterpret_cast<const float4*>(turns + i));
      const float x0 = x[i] * scale, x1 = x[i + 1] * scale, y0 = y[i] * scale, y1 = y[i + 1] * scale;
      lows[i / 2] = device::pack_pair<__half>(x0 * turn.x - y0 * turn.y, x1 * turn.z - y1 * turn.w);
      highs[i / 2] = device::pack_pair<__half>(x0 * turn.y + y0 * turn.x, x1 * turn.w + y1 * turn.z);
    }
    if (!wanted) {
      continue;
    }
    const uint32_t to = device::shared_address(shared.query) + chunk_offset<Tile::kKeyDim>(row, dim / 8);
    device::store_shared_16(to, low);
    device::store_shared_16(device::shared_address(shared.query) +
                                chunk_offset<Tile::kKeyDim>(row, dim / 8 + kLanes),
                            high);
    if (thread % kLanes == 0) {
      // not 0: a score of -inf stands for a key that takes no part and must stay -inf
      shared.unscale[row] = fmaxf(power.inverse * fabsf(p.score_scale), 0x1p-126f);
    }
  }
  device::fence_async_shared();
}

}  // namespace htree::tree_attention
