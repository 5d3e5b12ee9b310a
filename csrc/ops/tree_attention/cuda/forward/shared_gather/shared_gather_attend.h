// Launcher of the kernels in which neighbouring queries share one gather, on Hopper (sm_90a): r = 16, fp16 or
// bf16 inputs, K = V in {32, 64, 128}, G <= 16. No torch.
#pragma once

#include "ops/tree_attention/cuda/forward/attend_params.h"
#include "ops/tree_attention/cuda/launch_params.h"

namespace htree::tree_attention {

// params.rotations in RotationOrder::kFragments.
template <typename T, int kDim>
cudaError_t launch_shared_gather_attend(const AttendParams& params, cudaStream_t stream);

}  // namespace htree::tree_attention
