// Launchers of the kernels that take the queries of a list together, on Hopper (sm_90a): r = 16, fp16 or bf16
// inputs, K = V in {32, 64, 128}, any G. No torch.
#pragma once

#include "ops/tree_attention/cuda/forward/attend_params.h"
#include "ops/tree_attention/cuda/launch_params.h"

namespace htree::tree_attention {

// params.rotations in RotationOrder::kDims. Lists are those that the selection writes: a list holds min(list_width, parents
// up to the queries' own) entries.
template <typename T, int kDim>
cudaError_t launch_per_list_attend(const AttendParams& params, cudaStream_t stream);

}  // namespace htree::tree_attention
