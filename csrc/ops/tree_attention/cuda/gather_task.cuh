// Where a warp's query, list and keys are: docs/semantics/tree_attention.md §1.3.
#pragma once

#include "ops/tree_attention/cuda/launch_params.h"
#include "ops/tree_attention/cuda/parent_stream.cuh"

namespace htree::tree_attention {

// Node of the layer above `token`, and list of a query. Spans are powers of 16 and strides of 2: a division
// of 64 bits would be a call, and kernels that call have no uniform registers.
__device__ __forceinline__ int64_t node_of(const GatherParams& p, int64_t token) {
  return token >> (__ffsll(p.node_span) - 1);
}
__device__ __forceinline__ int64_t list_of(const GatherParams& p, int64_t query) {
  return query >> (__ffs(p.stride) - 1);
}

struct GatherTask {
  int batch, kv_head;
  int64_t token;
  const int32_t* list;   // null: 0, 1, 2, ...
  int num_slots;         // m
  int num_candidates;    // n
  int64_t first_parent;  // index of the kv head's first packed parent
};

// All lanes of a warp call with the same arguments. `query` counts from the first of the chunk; `list_row` is
// its list's row.
__device__ __forceinline__ GatherTask gather_task(const GatherParams& p, int head_index, int64_t query,
                                                  int64_t list_row) {
  GatherTask task;
  task.batch = head_index / p.num_kv_heads;
  task.kv_head = head_index % p.num_kv_heads;
  task.token = p.t0 + query;
  task.first_parent = static_cast<int64_t>(head_index) * p.num_parents;
  const int64_t rightmost = node_of(p, task.token);
  if (p.lists) {
    task.list =
        p.lists + task.batch * p.list_batch + (list_row * p.num_kv_heads + task.kv_head) * p.list_width;
    task.num_slots = count_entries(task.list, p.list_width);
  } else {
    task.list = nullptr;
    task.num_slots = static_cast<int>(rightmost / kParentRows) + 1;
  }
  task.num_candidates =
      task.num_slots > 0 ? (task.num_slots - 1) * kParentRows + static_cast<int>(rightmost % kParentRows) + 1
                         : 0;
  return task;
}

// First query row [G, K] of the task's kv head.
template <typename T>
__device__ __forceinline__ const T* query_rows(const GatherParams& p, const GatherTask& task, int64_t query) {
  return static_cast<const T*>(p.queries.data) + task.batch * p.queries.batch + query * p.queries.row +
         static_cast<int64_t>(task.kv_head) * p.group * p.queries.head;
}

}  // namespace htree::tree_attention
