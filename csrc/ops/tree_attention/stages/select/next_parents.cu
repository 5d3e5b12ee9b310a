#include "ops/tree_attention/stages/select/next_parents.cuh"

#include "ops/tree_attention/plan/select_plan.h"

namespace htree::tree_attention {
namespace {

NextParentsPlan next_parents_plan(const NextParentsParams& params) {
  NextParentsPlan plan{};
  plan.sort_size = power_of_two_above(params.top_k);
  plan.in_shared = plan.sort_size * 4 <= shared_limit();
  (plan.in_shared ? plan.shared_bytes : plan.scratch_bytes) = plan.sort_size * 4;
  const int64_t rows = std::min<int64_t>(params.num_rows(), INT32_MAX);
  plan.num_blocks = plan.in_shared ? rows : std::min(rows, kScratchBlocks);
  return plan;
}

template <typename Work>
void launch_as(const NextParentsParams& params, cudaStream_t stream) {
  if (params.num_rows() == 0 || params.top_k == 0) {
    return;
  }
  const NextParentsPlan plan = next_parents_plan(params);
  const auto kernel = compute_next_parents_kernel<Work>;
  allow_shared(kernel, plan.shared_bytes);
  kernel<<<static_cast<unsigned>(plan.num_blocks), kNextParentsThreads,
           static_cast<size_t>(plan.shared_bytes), stream>>>(params, plan);
}

}  // namespace

int64_t next_parents_scratch_bytes(const NextParentsParams& params) {
  const NextParentsPlan plan = next_parents_plan(params);
  return plan.scratch_bytes * plan.num_blocks;
}

void launch_compute_next_parents(const NextParentsParams& params, cudaStream_t stream) {
  launch_as<FullWork>(params, stream);
}

void launch_io_compute_next_parents(const NextParentsParams& params, cudaStream_t stream) {
  launch_as<IoOnly>(params, stream);
}

void launch_mask_topk_scores(const MaskParams& params, cudaStream_t stream) {
  const int64_t items = params.num_batches * params.num_queries * params.num_lists * params.top_k;
  if (items > 0) {
    mask_topk_scores_kernel<<<blocks_for(items), kElementThreads, 0, stream>>>(params, items);
  }
}

}  // namespace htree::tree_attention
