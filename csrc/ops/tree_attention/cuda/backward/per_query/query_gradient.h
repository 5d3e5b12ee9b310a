// dQ with a gather for every query of its own: sm_80 and later. No torch.
#pragma once

#include "ops/tree_attention/cuda/backward/gradient_params.h"

namespace htree::tree_attention {

struct QueryGradientParams {
  GradientParams common;
  bool first = false;
  bool last = false;
  float* partial = nullptr;    // [num_batches, num_queries, H, K] between layers
  void* gradient = nullptr;    // dQ [B, T_q, H, K]
  int64_t gradient_batch = 0;  // stride in elements
};
template <typename T, int kDim>
cudaError_t launch_query_gradient(const QueryGradientParams& params, cudaStream_t stream);

}  // namespace htree::tree_attention
