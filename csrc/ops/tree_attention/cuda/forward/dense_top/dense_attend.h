// The softmax over what was not selected at a dense top, one launch over all queries of a chunk, on Hopper (sm_90a).
// No torch.
#pragma once

#include "ops/tree_attention/cuda/forward/attend_params.h"
#include "ops/tree_attention/cuda/tree/dense_layer.h"

namespace htree::tree_attention {

// As launch_attend for the top layer, which is the first: writes max, sum and partial.
struct DenseAttendParams {
  AttendParams attend;
  DenseTiles tiles;
};
template <typename T, int kDim>
cudaError_t launch_dense_attend(const DenseAttendParams& params, cudaStream_t stream);

}  // namespace htree::tree_attention
