// Nodes and scores at the chosen positions, one query head per list. No torch.
#include "device/numeric.cuh"
#include "host/cuda/kernel_launch.h"
#include "ops/tree_attention/stages/gather/accumulate_launch.h"
#include "ops/tree_attention/stages/grid.h"
#include "ops/tree_attention/stages/lists.cuh"

namespace htree::tree_attention {
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
