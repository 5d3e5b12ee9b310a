// The steps of a selection whose kernels are the same for every type, and the memory that a selection needs. No
// torch.
#include "device/numeric.cuh"
#include "host/cuda/kernel_launch.h"
#include "ops/tree_attention/plan/select_plan.h"
#include "ops/tree_attention/stages/grid.h"
#include "ops/tree_attention/stages/lists.cuh"
#include "ops/tree_attention/stages/select/select_launch.h"

namespace htree::tree_attention {
namespace {

// A thread owns one listed position of one row of scores.
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

}  // namespace htree::tree_attention
