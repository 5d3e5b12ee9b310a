// Launches of union_gradient.cuh; each instance file makes one head dim and dtype.
#pragma once

#include "ops/tree_attention/attention/shared_bytes.h"
#include "ops/tree_attention/cuda/backward/shared_gather/shared_gather_gradient.cuh"

namespace htree::tree_attention {

template <typename T, int kDim, bool kSelected>
void launch_union_gradient_kernel(const UnionGradientParams& params, cudaStream_t stream) {
  using Shape = UnionGradientShape<kDim>;
  auto kernel = union_gradient_kernel<T, kDim, kSelected>;
  constexpr int kBytes = static_cast<int>(sizeof(typename Shape::Shared));
  allow_shared_bytes(kernel, kBytes);
  const GatherParams& p = params.query.common.gather;
  const dim3 grid((p.num_queries + Shape::kWarps - 1) / Shape::kWarps, p.num_batches * p.num_kv_heads);
  kernel<<<grid, Shape::kThreads, kBytes, stream>>>(params);
}

template <typename T, int kDim>
void launch_union_gradient_instance(const UnionGradientParams& params, cudaStream_t stream) {
  if (params.query.common.selected) {
    launch_union_gradient_kernel<T, kDim, true>(params, stream);
  } else {
    launch_union_gradient_kernel<T, kDim, false>(params, stream);
  }
}

#define HTREE_UNION_GRADIENT_INSTANCES(PREFIX, T, DIM)                                           \
  PREFIX template void launch_union_gradient_instance<T, DIM>(const UnionGradientParams& params, \
                                                              cudaStream_t stream);

}  // namespace htree::tree_attention
