// The query side of a block in shared memory: queries rotated to their positions, dO and their numbers.
#pragma once

#include "device/hopper/tma.cuh"
#include "ops/tree_attention/cuda/backward/per_list/gradient_tile.cuh"
#include "ops/tree_attention/cuda/query_row.cuh"

namespace htree::tree_attention {

__device__ __forceinline__ int position_of(const GatherParams& p, const GradientTask& task, int query) {
  const int64_t rightmost = node_of(p, p.t0 + query);
  return max(task.num_slots - 1, 0) * kParentRows + static_cast<int>(rightmost % kParentRows);
}

// All rows of the block; kThreads threads call, `thread` in 0 ... kThreads - 1. Rows without a query are
// zero, and so are their weights.
template <typename T, typename Tile, int kThreads>
__device__ __forceinline__ void load_gradient_rows(const PerListGradientParams& params,
                                                   const GradientTask& task, const HeadPowers<T>& powers,
                                                   GradientShared<Tile>& shared, int thread) {
  constexpr int kHalf = Tile::kDim / 2;
  constexpr int kLanes = kHalf / 8;  // of one row: 8 dims of the lower half and their partners each
  constexpr int kRowsPerPass = kThreads / kLanes;
  static_assert(kGradientRows % kRowsPerPass == 0);
  const GatherParams& p = params.gather;
  const auto head_rows = [&](const TensorView& view) {
    return static_cast<const T*>(view.data) + task.batch * view.batch +
           int64_t{task.kv_head} * p.group * view.head;
  };
  const T* queries = head_rows(p.queries);
  const T* gradients = head_rows(params.gradients);
  const int chunk = thread % kLanes, dim = chunk * 8;
  const float power = powers.signed_query(params.scale);
  constexpr int kPasses = kGradientRows / kRowsPerPass;
  // all on their way before the first is used
  uint4 query_low[kPasses], query_high[kPasses], gradient_low[kPasses], gradient_high[kPasses];
  float4 rotations[kPasses][4];
  RowMeta meta[kPasses];
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const PairPlace at = pair_place(p, task, pass * kRowsPerPass + thread / kLanes);
    query_low[pass] = query_high[pass] = gradient_low[pass] = gradient_high[pass] = uint4{};
    if (at.exists) {
      const T* query = queries + at.query * p.queries.row + at.head * p.queries.head + dim;
      query_low[pass] = load_eight(query, p.queries.aligned);
      query_high[pass] = load_eight(query + kHalf, p.queries.aligned);
      const T* gradient = gradients + at.query * params.gradients.row + at.head * params.gradients.head + dim;
      const bool aligned = reinterpret_cast<uintptr_t>(gradient) % 16 == 0;
      gradient_low[pass] = load_eight(gradient, aligned);
      gradient_high[pass] = load_eight(gradient + kHalf, aligned);
      const int64_t first = int64_t{task.head_index} * p.num_queries;
      meta[pass] = params.meta[(first + at.query) * p.group + at.head];
    }
    const int position = at.exists ? position_of(p, task, at.query) : 0;
    const float4* table = reinterpret_cast<const float4*>(p.rope + int64_t{position} * kHalf + dim);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      rotations[pass][i] = __ldg(table + i);
    }
  }
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    const int row = pass * kRowsPerPass + thread / kLanes;
    const PairPlace at = pair_place(p, task, row);
    const int position = at.exists ? position_of(p, task, at.query) : 0;
    float x[8], y[8];
    widen_eight<T>(query_low[pass], x);
    widen_eight<T>(query_high[pass], y);
    uint4 low, high;
    rotate_eight(x, y, power, rotations[pass], low, high);
    const int low_at = chunk_offset<Tile::kDim>(row, chunk),
              high_at = chunk_offset<Tile::kDim>(row, chunk + kLanes);
    *reinterpret_cast<uint4*>(shared.query + low_at) = low;
    *reinterpret_cast<uint4*>(shared.query + high_at) = high;
    *reinterpret_cast<uint4*>(shared.gradient + low_at) = gradient_low[pass];
    *reinterpret_cast<uint4*>(shared.gradient + high_at) = gradient_high[pass];
    if (chunk == 0) {
      float log_sum = INFINITY, delta = 0.f;
      int limit = 0;
      if (at.exists) {
        log_sum = meta[pass].log_sum - HeadPowers<T>::kWeightShift;
        delta = meta[pass].delta * powers.weighted_gradient();
        limit = position % kParentRows + (params.selected ? 0 : 1);
      }
      shared.log_sum[row] = log_sum;
      shared.delta[row] = delta;
      shared.own_limit[row] = static_cast<uint8_t>(limit);
    }
  }
  device::fence_async_shared();
}

}  // namespace htree::tree_attention
