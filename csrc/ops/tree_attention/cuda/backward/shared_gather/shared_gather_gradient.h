// Launcher of dQ by shared gathers on Hopper (sm_90a): r = 16, fp16 or bf16 inputs, K = V in {32, 64, 128}, G
// <= kMaxUnionGroup, docs/semantics/tree_attention.md §1.10. No torch.
#pragma once

#include "ops/tree_attention/cuda/backward/gradient_launch.h"

namespace htree::tree_attention {

// As launch_query_gradient; `turns` [list_width + 1 slots] in TurnOrder::kFragments.
struct UnionGradientParams {
  QueryGradientParams query;
  const __half2* turns = nullptr;
};
void launch_union_gradient(const TensorCoreShape& shape, const UnionGradientParams& params,
                           cudaStream_t stream);

}  // namespace htree::tree_attention
