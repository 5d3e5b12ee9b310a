// Which list and rows a block of per_list_gradient.cuh works for, and the powers of two of its operands:
// docs/semantics/tree_attention.md §1.3, §1.10, §1.12.
#pragma once

#include "ops/tree_attention/cuda/backward/gradient_rows.cuh"
#include "ops/tree_attention/cuda/backward/per_list/per_list_gradient.h"
#include "ops/tree_attention/cuda/gather_task.cuh"
#include "ops/tree_attention/cuda/tree/packed_parent.cuh"

namespace htree::tree_attention {

constexpr int kGradientSlots = 8;  // parents of a tile
constexpr int kGradientKeys = kGradientSlots * kParentRows;

// A list and 128 of its (query, head) pairs. All queries of a list stand under the same parent of the layer.
struct GradientTask {
  int head_index;  // batch * kv heads + kv head
  int batch, kv_head;
  int list_row;
  int first_pair;                // of the block among the list's
  int first_query, num_queries;  // of the list, in the chunk
  int num_slots;                 // m; 0 when everything is selected and nothing takes part
  int num_tiles;
  int64_t own_parent;
  // Children of the own parent that take part for the first and for the last query of the list.
  int own_first, own_last;
};

struct PairPlace {
  bool exists;
  int query;  // in the chunk
  int head;   // of the kv head's group
};

__host__ __device__ inline int tasks_per_list(const GatherParams& p) {
  return (p.stride * p.group + kGradientRows - 1) / kGradientRows;
}

// Parents that add to the softmax of the queries of a list; a row of counts is [num_lists, H_kv].
__device__ __forceinline__ int taking_part(const PerListGradientParams& params, int batch, int kv_head,
                                           int list_row) {
  const GatherParams& p = params.gather;
  const int64_t rightmost = node_of(p, p.t0 - params.lead + int64_t{list_row} * p.stride);
  const int count = params.counts
                        ? params.counts[(batch * int64_t{p.num_lists} + list_row) * p.num_kv_heads + kv_head]
                        : static_cast<int>(rightmost / kParentRows) + 1;
  const int64_t candidates = (count - 1) * int64_t{kParentRows} + rightmost % kParentRows + 1;
  return params.selected && candidates <= p.list_width ? 0 : count;
}

__device__ __forceinline__ GradientTask gradient_task(const PerListGradientParams& params,
                                                      uint32_t task_idx) {
  const GatherParams& p = params.gather;
  const uint32_t per_list = tasks_per_list(p), num_lists = p.num_lists;
  const uint32_t list_idx = task_idx / per_list;
  GradientTask task;
  task.first_pair = static_cast<int>(task_idx % per_list) * kGradientRows;
  task.list_row = static_cast<int>(list_idx % num_lists);
  task.head_index = static_cast<int>(list_idx / num_lists);
  task.batch = task.head_index / p.num_kv_heads;
  task.kv_head = task.head_index % p.num_kv_heads;
  const int begin = task.list_row * p.stride - params.lead;
  task.first_query = max(begin, 0);
  task.num_queries = min(begin + p.stride, p.num_queries) - task.first_query;
  const int64_t first = node_of(p, p.t0 + task.first_query);
  const int64_t last = node_of(p, p.t0 + task.first_query + task.num_queries - 1);
  task.own_parent = first / kParentRows;
  const int excluded = params.selected ? 1 : 0;  // the query's own node is always selected
  task.own_first = static_cast<int>(first % kParentRows) + 1 - excluded;
  task.own_last = static_cast<int>(last % kParentRows) + 1 - excluded;
  task.num_slots = taking_part(params, task.batch, task.kv_head, task.list_row);
  task.num_tiles = (task.num_slots + kGradientSlots - 1) / kGradientSlots;
  return task;
}

__device__ __forceinline__ PairPlace pair_place(const GatherParams& p, const GradientTask& task, int row) {
  const int pair = task.first_pair + row;
  const int local = pair / p.group;
  return {local < task.num_queries, task.first_query + local, pair - local * p.group};
}

// Whether the queries of a task have masks of their own.
__device__ __forceinline__ bool query_masks(const PerListGradientParams& params) {
  return params.selected && params.mask_stride != params.gather.stride;
}

__device__ __forceinline__ float power_of_two(int exponent) {
  return __uint_as_float(static_cast<uint32_t>(min(max(exponent, -126), 127) + 127) << 23);
}
__device__ __forceinline__ int exponent_of(float power) {
  return static_cast<int>(__float_as_uint(power) >> 23 & 0xff) - 127;
}

// Powers of two common to a (batch, kv head) of the chunk, so that one fp16 copy of dS serves both dQ += dS K
// and dK += dS^T Q: what a row or key had of its own would have to be undone inside either sum.
template <typename T>
struct HeadPowers {
  float key;             // keys times it are in fp16's range
  float query;           // queries, at most 2^14
  float score_gradient;  // dS, below 2^15
  // log2 of what weights are multiplied by: fp16 has too few small numbers for them
  static constexpr float kWeightShift = __is_same(T, __half) ? 14.f : 0.f;

  __device__ __forceinline__ HeadPowers(const PerListGradientParams& params, int head_index) {
    const KeyBounds keys = params.key_bounds[head_index];
    const QueryBounds queries = params.query_bounds[head_index];
    key = keys.key_unscale ? power_of_two(-exponent_of(__uint_as_float(keys.key_unscale))) : 1.f;
    query =
        queries.query_unscale ? power_of_two(6 - exponent_of(__uint_as_float(queries.query_unscale))) : 1.f;
    score_gradient =
        score_gradient_scale(__uint_as_float(queries.gradient_norm), __uint_as_float(keys.value_norm), 1.f)
            .scale;
  }

  __device__ __forceinline__ static float inverse(float power) { return power_of_two(-exponent_of(power)); }
  // Of dP and delta, which meet the shifted weights.
  __device__ __forceinline__ float weighted_gradient() const {
    return score_gradient * (kWeightShift == 0.f ? 1.f : 0x1p-14f);
  }
  // The sign of the scale goes with the queries, and its size is not 0: a score of -inf stands for a key that
  // takes no part and must stay -inf.
  __device__ __forceinline__ float signed_query(float scale) const { return scale < 0.f ? -query : query; }
  // Scores times it are in log2 units.
  __device__ __forceinline__ float score_factor(float score_scale) const {
    return fmaxf(fabsf(score_scale) * inverse(query) * inverse(key), 0x1p-126f);
  }
  // What is left to multiply sum dS K' and sum dS^T Q with.
  __device__ __forceinline__ float query_factor(float scale) const {
    return scale * inverse(key) * inverse(score_gradient);
  }
  __device__ __forceinline__ float key_factor(float scale) const {
    return fabsf(scale) * inverse(query) * inverse(score_gradient);
  }
};

}  // namespace htree::tree_attention
