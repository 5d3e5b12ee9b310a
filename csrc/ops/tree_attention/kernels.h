// CPU and CUDA entry points of tree attention, and of the ops that are several of its steps in one. Arguments
// come checked and outputs allocated (contiguous) by the prepare functions of the ops; a kernel writes every
// element of its outputs. Inputs may have any strides with a unit last one. Shapes: q [B, T_q, H, K], layer_k [B, N, H_kv, K], layer_v [B, N, H_kv, V], parents
// int32 [B, ceil(T_q/s), H_kv, k], cos and sin [size, K/2], states [B, T_q, H] and [B, T_q, H, V] in fp32
// (fp64 for fp64 inputs).
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <vector>

#include "ops/selection/selection_kernels.h"
#include "ops/sparse_attention/sparse_attention_kernels.h"
#include "ops/tree/tree_kernels.h"

namespace htree::tree_attention {

using Tensor = at::Tensor;

// ---- with one list per query head, and reverse subtraction: §1.7, §1.8. parents and topk_* are [B, T_q, H,
// k]; at layer 0 topk_* have width 0.
using ComputeAndSelect = void(const Tensor& q, const Tensor& layer_k, const Tensor& layer_v,
                              const Tensor& parents, const Tensor& cos, const Tensor& sin,
                              const LayerArgs& args, const Tensor& lmax, const Tensor& lsum,
                              const Tensor& lout, const Tensor& topk_indices, const Tensor& topk_scores);
ComputeAndSelect compute_and_select_cpu, compute_and_select_cuda;

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
SelectAccumulate accumulate_given_cuda;  // reads next_parents
BottomAccumulate bottom_accumulate_cpu, bottom_accumulate_cuda;
RecomputeSelection recompute_selection_cpu, recompute_selection_cuda;

// ---- the whole: §1.5, §1.10. `parents` holds one list tensor per layer, [0] for the bottom; attention_over_lists
// reads them, the forward writes them. Their batches may lie
// further apart than they are long; what a batch holds is packed. It is empty where lists are not kept; the backward
// then selects them again. `dlse`, the gradient of the log-sum-exps, is contiguous or undefined. An undefined dq, dk or
// dv is not wanted and costs nothing.
using AttentionForward = void(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionArgs& args,
                              const Tensor& out, const Tensor& gmax, const Tensor& gsum,
                              const std::vector<Tensor>& parents);
using AttentionBackward = void(const Tensor& dout, const Tensor& dlse, const Tensor& q, const Tensor& k,
                               const Tensor& v, const Tensor& out, const Tensor& gmax, const Tensor& gsum,
                               const std::vector<Tensor>& parents, const AttentionArgs& args,
                               const Tensor& dq, const Tensor& dk, const Tensor& dv);
AttentionForward attention_forward_cpu, attention_forward_cuda;
AttentionForward attention_over_lists_cpu, attention_over_lists_cuda;
AttentionBackward attention_backward_cpu, attention_backward_cuda;

}  // namespace htree::tree_attention
