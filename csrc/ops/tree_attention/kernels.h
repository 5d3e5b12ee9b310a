// CPU and CUDA entry points of the room. Arguments come checked and outputs allocated (contiguous) by the
// prepare functions of the stages; a kernel writes every element of its outputs. Inputs may have any strides
// with a unit last one. Shapes: q [B, T_q, H, K], layer_k [B, N, H_kv, K], layer_v [B, N, H_kv, V], parents
// int32 [B, ceil(T_q/s), H_kv, k], cos and sin [size, K/2], states [B, T_q, H] and [B, T_q, H, V] in fp32
// (fp64 for fp64 inputs).
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <vector>

#include "ops/tree_attention/stages/io_formulas.h"
#include "ops/tree_attention/tree_args.h"

namespace htree::tree_attention {

using Tensor = at::Tensor;

// ---- build: docs/semantics/tree_attention.md §1.2
using TreeBuild = void(const Tensor& k, const Tensor& v, int64_t r, const Tensor& pk, const Tensor& pv);
using TreeBuildBackward = void(const Tensor& dpk, const Tensor& dpv, int64_t r, const Tensor& dk,
                               const Tensor& dv);
TreeBuild tree_build_cpu, tree_build_cuda;
TreeBuildBackward tree_build_backward_cpu, tree_build_backward_cuda;
// means [B, ceil(T / span), H, K]
using SpanMeans = void(const Tensor& k, int64_t span, const Tensor& means);
SpanMeans span_means_cpu, span_means_cuda;

// ---- rope: §1.4. positions int32 or int64, [T] or [B, T].
using Rope = void(const Tensor& x, const Tensor& cos, const Tensor& sin, const Tensor& positions,
                  bool inverse, const Tensor& out);
Rope rope_cpu, rope_cuda;

// ---- scores and selection, staged: §1.3, §1.6
using ComputeScores = void(const Tensor& q, const Tensor& layer_k, const Tensor& parents, const Tensor& cos,
                           const Tensor& sin, const LayerArgs& args, const Tensor& scores,
                           const Tensor& num_candidates);
using SelectTopk = void(const Tensor& scores, const Tensor& num_candidates, int64_t top_k,
                        Importance importance, bool open_next, const Tensor& topk_positions);
using MaskTopkScores = void(const Tensor& scores, const Tensor& topk_positions);
using ComputeNextParents = void(const Tensor& parents, const Tensor& topk_positions, int64_t r,
                                const Tensor& next_parents);
using AccumulateNonTopk = void(const Tensor& layer_v, const Tensor& parents, const Tensor& scores,
                               const Tensor& num_candidates, const LayerArgs& args, const Tensor& lmax,
                               const Tensor& lsum, const Tensor& lout);
ComputeScores compute_scores_cpu, compute_scores_cuda;
SelectTopk select_topk_cpu, select_topk_cuda;
MaskTopkScores mask_topk_scores_cpu, mask_topk_scores_cuda;
ComputeNextParents compute_next_parents_cpu, compute_next_parents_cuda;
AccumulateNonTopk accumulate_non_topk_cpu, accumulate_non_topk_cuda;

// ---- with one list per query head, and reverse subtraction: §1.7, §1.8. parents and topk_* are [B, T_q, H,
// k]; at layer 0 topk_* have width 0.
using ComputeAndSelect = void(const Tensor& q, const Tensor& layer_k, const Tensor& layer_v,
                              const Tensor& parents, const Tensor& cos, const Tensor& sin,
                              const LayerArgs& args, const Tensor& lmax, const Tensor& lsum,
                              const Tensor& lout, const Tensor& topk_indices, const Tensor& topk_scores);
// The states come as fresh copies and are updated in place.
using SubtractTopk = void(const Tensor& layer_v, const Tensor& topk_indices, const Tensor& topk_scores,
                          const Tensor& lmax, const Tensor& lsum, const Tensor& lout,
                          const Tensor& selected_indices);
ComputeAndSelect compute_and_select_cpu, compute_and_select_cuda;
SubtractTopk subtract_topk_cpu, subtract_topk_cuda;

// ---- fused: §1.8. span_k [B, ceil(T / args.selection_span), H_kv, K]: the span means of all tokens, undefined
// where args.selection_span is 0.
using SelectAccumulate = void(const Tensor& q, const Tensor& layer_k, const Tensor& layer_v,
                              const Tensor& span_k, const Tensor& parents, const Tensor& cos,
                              const Tensor& sin, const LayerArgs& args, const Tensor& lmax,
                              const Tensor& lsum, const Tensor& lout, const Tensor& next_parents);
using BottomAccumulate = void(const Tensor& q, const Tensor& layer_k, const Tensor& layer_v,
                              const Tensor& parents, const Tensor& cos, const Tensor& sin,
                              const LayerArgs& args, const Tensor& lmax, const Tensor& lsum,
                              const Tensor& lout);
using RecomputeSelection = void(const Tensor& q, const Tensor& layer_k, const Tensor& span_k,
                                const Tensor& parents, const Tensor& cos, const Tensor& sin,
                                const LayerArgs& args, const Tensor& next_parents);
SelectAccumulate select_accumulate_cpu, select_accumulate_cuda;
BottomAccumulate bottom_accumulate_cpu, bottom_accumulate_cuda;
RecomputeSelection recompute_selection_cpu, recompute_selection_cuda;

// ---- merge: §1.7
using MergeToGlobal = void(const Tensor& gmax, const Tensor& gsum, const Tensor& gout, const Tensor& lmax,
                           const Tensor& lsum, const Tensor& lout);
using FinalNormalize = void(const Tensor& gout, const Tensor& gsum, const Tensor& out);
MergeToGlobal merge_to_global_cpu, merge_to_global_cuda;
FinalNormalize final_normalize_cpu, final_normalize_cuda;

// ---- the whole: §1.5, §1.10. `parents` holds one list tensor per layer, [0] for the bottom. Their batches may lie
// further apart than they are long; what a batch holds is packed. It is empty where lists are not kept; the backward
// then selects them again. `dlse`, the gradient of the log-sum-exps, is contiguous or undefined. An undefined dq, dk or dv is not
// wanted and costs nothing.
using AttentionForward = void(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionArgs& args,
                              const Tensor& out, const Tensor& gmax, const Tensor& gsum,
                              const std::vector<Tensor>& parents);
using AttentionBackward = void(const Tensor& dout, const Tensor& dlse, const Tensor& q, const Tensor& k,
                               const Tensor& v, const Tensor& out, const Tensor& gmax, const Tensor& gsum,
                               const std::vector<Tensor>& parents, const AttentionArgs& args,
                               const Tensor& dq, const Tensor& dk, const Tensor& dv);
AttentionForward attention_forward_cpu, attention_forward_cuda;
AttentionBackward attention_backward_cpu, attention_backward_cuda;

// ---- the IO-only twins: the same kernels with the policy IoOnly, for tensors of the same shapes, under the
// same contracts. docs/semantics/io_twins.md §2.2.
using IoSelectTopk = void(const Tensor& scores, const Tensor& num_candidates, int64_t top_k,
                          const IoPositions& io, const Tensor& topk_positions);

ComputeScores io_compute_scores_cpu, io_compute_scores_cuda;
IoSelectTopk io_select_topk_cpu, io_select_topk_cuda;
ComputeNextParents io_compute_next_parents_cpu, io_compute_next_parents_cuda;

}  // namespace htree::tree_attention
