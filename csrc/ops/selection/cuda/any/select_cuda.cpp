// CUDA entry points of the select stage.
#include "device/work.cuh"
#include "ops/selection/cuda/any/select_topk.h"
#include "ops/selection/selection_kernels.h"
#include "ops/tree/cuda/any/cuda_tensors.h"

namespace htree::tree_attention {
namespace {

template <typename Work>
void launch_select(const Tensor& scores, const Tensor& num_candidates, int64_t top_k,
                   const SelectionOptions& selection, const IoPositions& io, const Tensor& topk_positions) {
  const LaunchScope scope(scores);
  const Tensor dense_scores = scores.contiguous();
  const Tensor dense_counts = num_candidates.contiguous();
  SelectParams params;
  params.scores = input<float>(dense_scores);
  params.num_candidates = input<int32_t>(dense_counts);
  params.positions = output<int32_t>(topk_positions);
  params.num_batches = scores.size(0);
  params.score_queries = params.num_queries = scores.size(1);
  params.num_lists = scores.size(2);
  params.capacity = scores.size(3);
  params.group = scores.size(4);
  params.top_k = top_k;
  params.selection = selection;
  params.io = io;
  const Tensor scratch = device_scratch(select_scratch_bytes(params), scores);
  params.scratch = scratch_pointer(scratch);
  C10_CUDA_CHECK(launch_select_topk<Work>(params, scope.stream()));
}

template <typename Work>
void launch_next_parents(const Tensor& parents, const Tensor& topk_positions, int64_t r,
                         const Tensor& next_parents) {
  const LaunchScope scope(next_parents);
  NextParentsParams params;
  params.parents = input_view<int32_t>(parents);
  params.positions = input_view<int32_t>(topk_positions);
  params.next_parents = output_view<int32_t>(next_parents);
  params.num_batches = next_parents.size(0);
  params.num_queries = next_parents.size(1);
  params.num_lists = next_parents.size(2);
  params.list_width = parents.size(3);
  params.rate = r;
  params.top_k = next_parents.size(3);
  const Tensor scratch = device_scratch(next_parents_scratch_bytes(params), next_parents);
  params.scratch = scratch_pointer(scratch);
  C10_CUDA_CHECK(launch_compute_next_parents<Work>(params, scope.stream()));
}

}  // namespace

void select_topk_cuda(const Tensor& scores, const Tensor& num_candidates, int64_t top_k,
                      const SelectionOptions& selection, const Tensor& topk_positions) {
  launch_select<FullWork>(scores, num_candidates, top_k, selection, {}, topk_positions);
}

void io_select_topk_cuda(const Tensor& scores, const Tensor& num_candidates, int64_t top_k,
                         const IoPositions& io, const Tensor& topk_positions) {
  launch_select<IoOnly>(scores, num_candidates, top_k, {}, io, topk_positions);
}

void mask_topk_scores_cuda(const Tensor& scores, const Tensor& topk_positions) {
  const LaunchScope scope(scores);
  MaskParams params;
  params.scores = output<float>(scores);
  std::copy_n(scores.strides().begin(), 5, params.score_strides);
  params.positions = input_view<int32_t>(topk_positions);
  params.num_batches = scores.size(0);
  params.num_queries = scores.size(1);
  params.num_lists = scores.size(2);
  params.capacity = scores.size(3);
  params.group = scores.size(4);
  params.top_k = topk_positions.size(3);
  C10_CUDA_CHECK(launch_mask_topk_scores(params, scope.stream()));
}

void compute_next_parents_cuda(const Tensor& parents, const Tensor& topk_positions, int64_t r,
                               const Tensor& next_parents) {
  launch_next_parents<FullWork>(parents, topk_positions, r, next_parents);
}

void io_compute_next_parents_cuda(const Tensor& parents, const Tensor& topk_positions, int64_t r,
                                  const Tensor& next_parents) {
  launch_next_parents<IoOnly>(parents, topk_positions, r, next_parents);
}

}  // namespace htree::tree_attention
