// What the staged kernels share: which row a block works on, and what its list of parents holds.
#pragma once

#include "device/numeric.cuh"
#include "device/pack.cuh"
#include "device/reduce.cuh"
#include "ops/tree/cuda/any/geometry.h"
#include "ops/tree/tree_args.h"

namespace htree::tree_attention {

// The rows (b, i, list) in the order of memory; list is fastest.
struct RowIndex {
  int64_t batch;
  int64_t query;
  int64_t list;
};

__device__ __forceinline__ RowIndex row_index(int64_t row, int64_t num_queries, int64_t num_lists) {
  const int64_t list = row % num_lists;
  const int64_t query_row = row / num_lists;
  return {query_row / num_queries, query_row % num_queries, list};
}

template <typename T>
__device__ __forceinline__ T* at_row(const View<T>& view, int64_t batch, int64_t row, int64_t head) {
  return view.data + batch * view.batch + row * view.row + head * view.head;
}

// The list of one row: its parents, its last node and its number of candidates.
struct ListInfo {
  const int32_t* parents;
  int64_t rightmost;
  int64_t num_nodes;
  int64_t rate;
  int64_t num_candidates;

  // The node of candidate p < num_candidates, or -1 where the candidate is absent.
  __device__ __forceinline__ int64_t node(int64_t p) const {
    const uint32_t slot = static_cast<uint32_t>(p) / static_cast<uint32_t>(rate);  // positions are int32
    const int64_t id = parents[slot] * rate + (p - slot * rate);
    return node_present(id, rightmost, num_nodes) ? id : -1;
  }
};

struct MinInt {
  __device__ __forceinline__ int operator()(int a, int b) const { return a < b ? a : b; }
};

// The number of entries before the first -1. Every thread of a block of kThreads must call; all get the
// result. `scratch` holds kThreads / 32 ints in shared memory and is free again after the caller's next
// __syncthreads. The call costs one __syncthreads.
template <int kThreads>
__device__ __forceinline__ int64_t count_parents(const int32_t* parents, int64_t width, int* scratch) {
  int first_missing = static_cast<int>(width);
  for (int i = threadIdx.x; i < first_missing; i += kThreads) {
    if (parents[i] == -1) {
      first_missing = i;
    }
  }
  return device::block_reduce<kThreads, MinInt>(first_missing, scratch);
}

template <int kThreads>
__device__ __forceinline__ ListInfo list_info(const Geometry& geometry, const View<const int32_t>& parents,
                                              const RowIndex& row, int* scratch) {
  ListInfo info;
  info.parents = at_row(parents, row.batch, row.query / geometry.queries_per_list, row.list);
  info.rightmost = (geometry.t0 + row.query * geometry.query_step) / geometry.node_span;
  info.num_nodes = geometry.num_nodes;
  info.rate = geometry.rate;
  info.num_candidates = candidate_count(count_parents<kThreads>(info.parents, geometry.list_width, scratch),
                                        info.rightmost, geometry.rate);
  return info;
}

// Loads the scores of up to kHeads heads of one candidate; heads from num_heads on read as -inf.
template <int kHeads>
__device__ __forceinline__ void load_head_scores(const float* scores, int64_t num_heads,
                                                 float (&values)[kHeads]) {
  constexpr int kStep = kHeads < 4 ? kHeads : 4;
  if (num_heads == kHeads && reinterpret_cast<uintptr_t>(scores) % (4 * kStep) == 0) {
#pragma unroll
    for (int head = 0; head < kHeads; head += kStep) {
      const auto pack = device::load_pack<kStep>(scores + head);
#pragma unroll
      for (int e = 0; e < kStep; ++e) {
        values[head + e] = pack[e];
      }
    }
    return;
  }
#pragma unroll
  for (int head = 0; head < kHeads; ++head) {
    values[head] = head < num_heads ? scores[head] : device::negative_infinity<float>();
  }
}

}  // namespace htree::tree_attention
