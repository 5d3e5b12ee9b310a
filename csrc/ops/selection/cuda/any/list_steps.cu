// The steps of a selection whose kernels are the same for every type, and the size of a
// selection's scratch. No torch.
#include "device/numeric.cuh"
#include "host/cuda/kernel_launch.h"
#include "ops/selection/cuda/any/select_plan.h"
#include "ops/selection/cuda/any/select_topk.h"
#include "ops/tree/cuda/any/geometry.h"
#include "ops/tree/cuda/any/lists.cuh"

namespace htree::tree_attention {

namespace {

// A thread has one listed position of one row of scores.
__global__ void __launch_bounds__(kElementThreads)
    mask_topk_scores_kernel(const MaskParams params, int64_t num_items) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kElementThreads;
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * kElementThreads + threadIdx.x; item < num_items;
       item += step) {
    const int64_t rank = item % params.top_k;
    const RowIndex row = row_index(item / params.top_k, params.num_queries, params.num_lists);
    const int64_t p =
        at_row(params.positions, row.batch, row.query / params.queries_per_list, row.list)[rank];
    if (p >= 0 && p < params.capacity) {
      const int64_t* strides = params.score_strides;
      float* scores = params.scores + row.batch * strides[0] + row.query * strides[1] +
                      row.list * strides[2] + p * strides[3];
      for (int64_t head = 0; head < params.group; ++head) {
        scores[head * strides[4]] = device::negative_infinity<float>();
      }
    }
  }
}

}  // namespace

int64_t select_scratch_bytes(const SelectParams& params) {
  const SelectPlan plan = select_plan(params);
  return plan.scratch_bytes * plan.num_blocks;
}

int64_t next_parents_scratch_bytes(const NextParentsParams& params) {
  const NextParentsPlan plan = next_parents_plan(params);
  return plan.scratch_bytes * plan.num_blocks;
}

cudaError_t launch_mask_topk_scores(const MaskParams& params, cudaStream_t stream) {
  const int64_t items = params.num_batches * params.num_queries * params.num_lists * params.top_k;
  if (items == 0) {
    return cudaSuccess;
  }
  return launch_kernel(mask_topk_scores_kernel, {.grid = blocks_for(items), .threads = kElementThreads},
                       stream, params, items);
}

// ---- nodes and scores at the chosen positions, for lists that belong to one query head

namespace {

__global__ void __launch_bounds__(kElementThreads)
    pick_topk_kernel(const PickParams params, int64_t num_items) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kElementThreads;
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * kElementThreads + threadIdx.x; item < num_items;
       item += step) {
    const int64_t rank = item % params.top_k;
    const int64_t row_idx = item / params.top_k;
    const RowIndex row = row_index(row_idx, params.num_queries, params.num_lists);
    const int64_t p = params.positions[item];
    int32_t node = -1;
    float score = device::negative_infinity<float>();
    if (p >= 0) {
      const int64_t slot = p / params.rate;
      const int32_t* parents = at_row(params.parents, row.batch, row.query, row.list);
      node = static_cast<int32_t>(parents[slot] * params.rate + (p - slot * params.rate));
      score = params.scores[row_idx * params.capacity + p];
    }
    at_row(params.nodes, row.batch, row.query, row.list)[rank] = node;
    at_row(params.node_scores, row.batch, row.query, row.list)[rank] = score;
  }
}

}  // namespace

cudaError_t launch_pick_topk(const PickParams& params, cudaStream_t stream) {
  const int64_t items = params.num_batches * params.num_queries * params.num_lists * params.top_k;
  if (items == 0) {
    return cudaSuccess;
  }
  return launch_kernel(pick_topk_kernel, {.grid = blocks_for(items), .threads = kElementThreads}, stream,
                       params, items);
}

}  // namespace htree::tree_attention
