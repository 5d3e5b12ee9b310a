// A softmax step with a gather for every query of its own: sm_80 and later. No torch.
#pragma once

#include "ops/tree_attention/cuda/forward/attend_params.h"
#include "ops/tree_attention/cuda/launch_params.h"

namespace htree::tree_attention {

template <typename T, int kDim>
cudaError_t launch_per_query_attend(const AttendParams& params, cudaStream_t stream);

}  // namespace htree::tree_attention
