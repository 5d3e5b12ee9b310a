// CPU and CUDA entry points of the IO-only twins: the kernels of kernels.h with the policy IoOnly, for
// tensors of the same shapes and contracts. docs/semantics/io_twins.md §2.2.
#pragma once

#include "ops/tree_attention/kernels.h"
#include "ops/tree_attention/stages/io_positions.h"

namespace htree::tree_attention {

using IoSelectTopk = void(const Tensor& scores, const Tensor& num_candidates, int64_t top_k,
                          const IoPositions& io, const Tensor& topk_positions);

ComputeScores io_compute_scores_cpu, io_compute_scores_cuda;
IoSelectTopk io_select_topk_cpu, io_select_topk_cuda;
ComputeNextParents io_compute_next_parents_cpu, io_compute_next_parents_cuda;

}  // namespace htree::tree_attention
