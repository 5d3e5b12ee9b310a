// CPU and CUDA entry points of the softmax over lists, and of the states that it merges. Arguments come
// checked and outputs allocated (contiguous) by the prepare functions of the ops; a kernel writes every element
// of its outputs. Inputs may have any strides with a unit last one.
#pragma once

#include <ATen/core/Tensor.h>

#include "ops/tree/tree_args.h"

namespace htree::tree_attention {

using Tensor = at::Tensor;

// ---- what a list does not open, staged: §1.6
using AccumulateNonTopk = void(const Tensor& layer_v, const Tensor& parents, const Tensor& scores,
                               const Tensor& num_candidates, const LayerArgs& args, const Tensor& lmax,
                               const Tensor& lsum, const Tensor& lout);
AccumulateNonTopk accumulate_non_topk_cpu, accumulate_non_topk_cuda;

// ---- reverse subtraction: §1.7, §1.8. topk_* are [B, T_q, H, k], of width 0 at layer 0.
// The states come as fresh copies and are updated in place.
using SubtractTopk = void(const Tensor& layer_v, const Tensor& topk_indices, const Tensor& topk_scores,
                          const Tensor& lmax, const Tensor& lsum, const Tensor& lout,
                          const Tensor& selected_indices);
SubtractTopk subtract_topk_cpu, subtract_topk_cuda;

// ---- merge: §1.7
using MergeToGlobal = void(const Tensor& gmax, const Tensor& gsum, const Tensor& gout, const Tensor& lmax,
                           const Tensor& lsum, const Tensor& lout);
using FinalNormalize = void(const Tensor& gout, const Tensor& gsum, const Tensor& out);
MergeToGlobal merge_to_global_cpu, merge_to_global_cuda;
FinalNormalize final_normalize_cpu, final_normalize_cuda;

}  // namespace htree::tree_attention
