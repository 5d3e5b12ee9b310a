// Launcher of dQ by shared gathers on Hopper (sm_90a): r = 16, fp16 or bf16 inputs, K = V in {32, 64, 128}, G
// <= kMaxSharedGatherGroup, docs/semantics/tree_attention.md §1.10. No torch.
#pragma once

#include "ops/tree_attention/cuda/backward/per_query/query_gradient.h"

namespace htree::tree_attention {

// As launch_query_gradient; `rotations` [list_width + 1 slots] in RotationOrder::kFragments.
struct SharedGatherGradientParams {
  QueryGradientParams query;
  const __half2* rotations = nullptr;
};
template <typename T, int kDim>
cudaError_t launch_shared_gather_gradient(const SharedGatherGradientParams& params, cudaStream_t stream);

}  // namespace htree::tree_attention
