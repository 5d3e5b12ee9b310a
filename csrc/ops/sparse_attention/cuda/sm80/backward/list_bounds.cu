// The bounds of the keys and values that the queries of a list multiply, and the powers of two that follow for the tasks
// of per_list/. r = 16. No torch.
#include "host/cuda/kernel_launch.h"
#include "ops/sparse_attention/cuda/sm80/backward/gradient_rows.cuh"
#include "ops/sparse_attention/cuda/sm80/masked_lists.cuh"

namespace htree::tree_attention {

constexpr int kEarlierThreads = 256;

// Grid: x = batch * kv head.
__global__ void __launch_bounds__(kEarlierThreads) earlier_bounds_kernel(EarlierBoundParams p) {
  __shared__ KeyBound of_warps[kEarlierThreads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t head = blockIdx.x * p.head_parents;
  KeyBound base = {0, 0};
  for (int64_t first = 0; first < p.num_parents; first += kEarlierThreads) {
    const int64_t parent = first + threadIdx.x;
    KeyBound bound = parent < p.num_parents ? p.bounds.parents[head + parent] : KeyBound{0, 0};
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const KeyBound before = bound_of_lane_before(bound, offset);
      bound = lane >= offset ? larger(bound, before) : bound;
    }
    const KeyBound before = bound_of_lane_before(bound, 1);
    if (lane == 31) {
      of_warps[warp] = bound;
    }
    __syncthreads();
    KeyBound earlier = lane > 0 ? larger(base, before) : base;
#pragma unroll
    for (int i = 0; i < kEarlierThreads / 32; ++i) {
      earlier = i < warp ? larger(earlier, of_warps[i]) : earlier;
      base = larger(base, of_warps[i]);
    }
    __syncthreads();
    if (parent < p.num_parents) {
      p.bounds.earlier[head + parent] = earlier;
    }
  }
}

cudaError_t launch_earlier_bounds(const EarlierBoundParams& params, cudaStream_t stream) {
  return launch_kernel(earlier_bounds_kernel,
                       {.grid = static_cast<unsigned>(params.num_heads), .threads = kEarlierThreads}, stream,
                       params);
}

constexpr int kListBoundWarps = 8;

// The queries of a list, counted in the chunk, and the place of the last of them in the tree.
struct ListQueries {
  int first, count;
  int64_t diagonal_parent;
  int own_children;  // of the diagonal parent that take part

  __device__ __forceinline__ ListQueries(const ListBoundParams& params, int head_index, int list_row) {
    const GatherParams& p = params.gather;
    const int begin = list_row * p.stride - params.lead;
    first = max(begin, 0);
    count = min(begin + p.stride, p.num_queries) - first;
    const int64_t node = node_of(p, p.t0 + first + count - 1);
    diagonal_parent = node / kParentRows;
    own_children = static_cast<int>(node % kParentRows) + (params.refines_own ? 0 : 1);
    if (p.list_sizes &&
        p.list_sizes[list_number(p, head_index / p.num_kv_heads, list_row, head_index % p.num_kv_heads)] <
            0) {
      own_children = 0;
    }
  }
};

// The bound of the parents before the own one that a list holds. All lanes of a warp call and get the result.
__device__ __forceinline__ KeyBound bound_of_parents(const ListBoundParams& params, int head_index,
                                                     int list_row, int64_t diagonal_parent) {
  const GatherParams& p = params.gather;
  const int64_t head = int64_t{head_index} * p.num_parents;
  if (!p.lists) {
    return params.bounds.earlier[head + diagonal_parent];
  }
  const int batch = head_index / p.num_kv_heads, kv_head = head_index % p.num_kv_heads;
  const int32_t* list =
      p.lists + batch * p.list_batch + (int64_t{list_row} * p.num_kv_heads + kv_head) * p.list_width;
  KeyBound bound = {0, 0};
#pragma unroll 4
  for (int slot = threadIdx.x % 32; slot < p.list_width; slot += 32) {
    // A list that is empty for those who gather may be a masked one.
    const int parent = list[slot] < 0 && p.list_sizes ? masked_parent(p, list[slot]) : list[slot];
    // A caller's list may hold the diagonal parent before its end, where it counts whole, and later parents, which are
    // absent.
    const bool inner = parent == diagonal_parent && slot + 1 < p.list_width && list[slot + 1] >= 0;
    if (parent >= 0 && (parent < diagonal_parent || inner)) {
      bound = larger(bound, params.bounds.parents[head + parent]);
    }
  }
  return {static_cast<uint8_t>(__reduce_max_sync(device::kFullMask, bound.value)),
          static_cast<uint8_t>(__reduce_max_sync(device::kFullMask, bound.unscale))};
}

// The powers of the task that has `count` rows (query, head) from `meta` on. All lanes of a warp call.
__device__ __forceinline__ TaskPowers task_powers(const RowMeta* meta, int count, KeyBound bound) {
  float norm = 0.f, delta = 0.f;
  for (int row = threadIdx.x % 32; row < count; row += 32) {
    norm = fmaxf(norm, meta[row].gradient_norm);
    delta = fmaxf(delta, finite_magnitude(meta[row].delta));
  }
  norm = device::warp_reduce<device::Max>(norm);
  delta = device::warp_reduce<device::Max>(delta);
  // Keys are multiplied by a power of two that the task has in common, so no power of theirs is left to undo: 127 is the
  // field of 1.
  const int shift = bound.unscale == 0 ? 0 : min(max(127 - static_cast<int>(bound.unscale), -126), 126);
  return {__uint_as_float(static_cast<uint32_t>(127 + shift) << 23),
          score_gradient_scale(norm, delta, bound.value, 127).scale};
}

// One warp for a (batch, kv head, list), the last fastest.
__global__ void __launch_bounds__(kListBoundWarps * 32) list_bounds_kernel(ListBoundParams params) {
  const GatherParams& p = params.gather;
  const int64_t list_idx = int64_t{blockIdx.x} * kListBoundWarps + threadIdx.x / 32;
  if (list_idx >= int64_t{p.num_batches} * p.num_kv_heads * p.num_lists) {
    return;
  }
  const int head_index = static_cast<int>(list_idx / p.num_lists);
  const int list_row = static_cast<int>(list_idx % p.num_lists);
  const ListQueries queries(params, head_index, list_row);
  KeyBound bound = bound_of_parents(params, head_index, list_row, queries.diagonal_parent);
  if (queries.own_children > 0) {
    const int64_t parent = int64_t{head_index} * p.num_parents + queries.diagonal_parent;
    bound = larger(bound, params.bounds.nodes[parent * kParentRows + queries.own_children - 1]);
  }
  const int lane = threadIdx.x % 32;
  if (params.lists && lane == 0) {
    params.lists[list_idx] = bound;
  }
  if (params.powers) {
    const RowMeta* meta = params.meta + (int64_t{head_index} * p.num_queries + queries.first) * p.group;
    const int rows = queries.count * p.group;
    for (int task = 0; task < params.tasks; ++task) {
      const int first = min(task * kGradientRows, rows);
      const TaskPowers powers = task_powers(meta + first, min(kGradientRows, rows - first), bound);
      if (lane == 0) {
        params.powers[list_idx * params.tasks + task] = powers;
      }
    }
  }
}

cudaError_t launch_list_bounds(const ListBoundParams& params, cudaStream_t stream) {
  const GatherParams& p = params.gather;
  const int64_t lists = int64_t{p.num_batches} * p.num_kv_heads * p.num_lists;
  return launch_kernel(list_bounds_kernel,
                       {.grid = num_blocks(lists, kListBoundWarps), .threads = kListBoundWarps * 32}, stream,
                       params);
}

}  // namespace htree::tree_attention
