// One layer on CUDA for every dtype and shape, composed of the staged kernels over bounded chunks of queries.
// docs/semantics/tree_attention.md §1.8. Arguments as in kernels.h; undefined `cos` and `sin` mean no
// rotation.
#pragma once

#include <ATen/core/Tensor.h>

#include "ops/tree_attention/kernels.h"

namespace htree::tree_attention {

// Scores of one chunk take at most this many bytes, unless one list row of one kv head alone needs more.
constexpr int64_t kScoreScratchBytes = int64_t{256} << 20;

SelectAccumulate select_accumulate_general;
BottomAccumulate bottom_accumulate_general;
RecomputeSelection recompute_selection_general;

}  // namespace htree::tree_attention
