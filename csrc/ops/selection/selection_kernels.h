// CPU and CUDA entry points of scores and selection. Arguments come checked and outputs allocated
// (contiguous) by the prepare functions of the ops; a kernel writes every element of its outputs. Inputs may
// have any strides with a unit last one.
#pragma once

#include <ATen/core/Tensor.h>

#include "ops/tree/io_formulas.h"
#include "ops/tree/tree_args.h"

namespace htree::tree_attention {

using Tensor = at::Tensor;

// ---- scores and selection, staged: §1.3, §1.6
using ComputeScores = void(const Tensor& q, const Tensor& layer_k, const Tensor& parents, const Tensor& cos,
                           const Tensor& sin, const LayerArgs& args, const Tensor& scores,
                           const Tensor& num_candidates);
using SelectTopk = void(const Tensor& scores, const Tensor& num_candidates, int64_t top_k,
                        const SelectionOptions& selection, const Tensor& topk_positions);
using MaskTopkScores = void(const Tensor& scores, const Tensor& topk_positions);
using ComputeNextParents = void(const Tensor& parents, const Tensor& topk_positions, int64_t r,
                                const Tensor& next_parents);
ComputeScores compute_scores_cpu, compute_scores_cuda;
SelectTopk select_topk_cpu, select_topk_cuda;
MaskTopkScores mask_topk_scores_cpu, mask_topk_scores_cuda;
ComputeNextParents compute_next_parents_cpu, compute_next_parents_cuda;

// ---- the IO-only variants: the same kernels with the policy IoOnly, for tensors of the same shapes, under the
// same contracts. docs/semantics/io_only.md §2.2.
using IoSelectTopk = void(const Tensor& scores, const Tensor& num_candidates, int64_t top_k,
                          const IoPositions& io, const Tensor& topk_positions);

ComputeScores io_compute_scores_cpu, io_compute_scores_cuda;
IoSelectTopk io_select_topk_cpu, io_select_topk_cuda;
ComputeNextParents io_compute_next_parents_cpu, io_compute_next_parents_cuda;

}  // namespace htree::tree_attention
