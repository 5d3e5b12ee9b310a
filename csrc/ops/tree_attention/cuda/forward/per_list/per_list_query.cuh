// Query rows of a selection block in shared memory as the A operand of S = Q K'^T, and where a row belongs.
#pragma once

#include "device/hopper/tma.cuh"
#include "device/shared_memory.cuh"
#include "ops/tree_attention/cuda/forward/per_list/per_list_row.cuh"
#include "ops/tree_attention/cuda/query_row.cuh"

namespace htree::tree_attention {

// Rows [first_row, first_row + kCount) of the block, rotated to position n - 1 of their query, in fp16 with a
// power of two per row; 128 threads call, `thread` in 0 ... 127. The sign of the scale goes with the queries,
// its size into shared.unscale.
template <typename T, typename Tile, int kCount>
__device__ __forceinline__ void load_query_rows(const GatherParams& p, const ListTask& task,
                                                PerListShared<Tile>& shared, int first_row, int thread) {
  constexpr int kHalf = Tile::kKeyDim / 2;
  constexpr int kLanes = kHalf / 8;  // of one row: 8 dims of the lower half and their partners each
  constexpr int kRowsPerPass = 128 / kLanes;
  const int batch = task.head_index / p.num_kv_heads, kv_head = task.head_index % p.num_kv_heads;
  const T* head_rows = static_cast<const T*>(p.queries.data) + batch * p.queries.batch +
                       static_cast<int64_t>(kv_head) * p.group * p.queries.head;
  const int dim = thread % kLanes * 8;
  const float sign = p.score_scale < 0.f ? -1.f : 1.f;
  constexpr int kPasses = (kCount + kRowsPerPass - 1) / kRowsPerPass;
  // All rows are asked for before any is used: one round trip to memory.
  uint4 raw_low[kPasses], raw_high[kPasses];
  int position[kPasses];
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int row_idx = pass * kRowsPerPass + thread / kLanes;
    const ListRow at = ListRow::of<Tile>(p, task, first_row + row_idx);
    raw_low[pass] = raw_high[pass] = uint4{0, 0, 0, 0};
    position[pass] = 0;
    if ((kCount % kRowsPerPass == 0 || row_idx < kCount) && at.exists) {
      const T* from = head_rows + at.query * p.queries.row + at.head * p.queries.head + dim;
      raw_low[pass] = load_eight(from, p.queries.aligned);
      raw_high[pass] = load_eight(from + kHalf, p.queries.aligned);
      position[pass] = max(task.num_slots - 1, 0) * kParentRows +
                       static_cast<int>(node_of(p, p.t0 + at.query) % kParentRows);
    }
  }
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int row_idx = pass * kRowsPerPass + thread / kLanes;
    const int row = first_row + row_idx;
    float low[8], high[8];
    widen_eight<T>(raw_low[pass], low);
    widen_eight<T>(raw_high[pass], high);
    const PowerOfTwo power = half_range_scale(row_magnitude<kLanes>(low, high));
    const float4* rotation =
        reinterpret_cast<const float4*>(p.rope + static_cast<int64_t>(position[pass]) * kHalf + dim);
    const float4 rotations[4] = {__ldg(rotation), __ldg(rotation + 1), __ldg(rotation + 2),
                                 __ldg(rotation + 3)};
    uint4 rotated_low, rotated_high;
    rotate_eight(low, high, power.scale * sign, rotations, rotated_low, rotated_high);
    if (kCount % kRowsPerPass != 0 && row_idx >= kCount) {
      continue;
    }
    const uint32_t rows = device::shared_address(shared.query);
    device::store_shared_16(rows + chunk_offset<Tile::kKeyDim>(row, dim / 8), rotated_low);
    device::store_shared_16(rows + chunk_offset<Tile::kKeyDim>(row, dim / 8 + kLanes), rotated_high);
    if (thread % kLanes == 0) {
      // not 0: a score of -inf stands for a key that takes no part and must stay -inf
      shared.unscale[row] = fmaxf(power.inverse * fabsf(p.score_scale), 0x1p-126f);
    }
  }
  device::fence_async_shared();
}

}  // namespace htree::tree_attention
