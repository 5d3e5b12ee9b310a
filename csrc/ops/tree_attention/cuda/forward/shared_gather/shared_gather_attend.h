// Launcher of the kernels in which neighbouring queries share one gather, on Hopper (sm_90a): r = 16, fp16 or
// bf16 inputs, K = V in {32, 64, 128}, G <= 16. No torch.
#pragma once

#include "ops/tree_attention/cuda/launch_params.h"

namespace htree::tree_attention {

// As launch_attend; params.turns in TurnOrder::kFragments.
void launch_union_attend(const TensorCoreShape& shape, const AttendParams& params, cudaStream_t stream);

}  // namespace htree::tree_attention
