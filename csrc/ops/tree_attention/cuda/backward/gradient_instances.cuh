// Launches of the gradient kernels whose shape is a template argument; each instance file makes one head dim.
#pragma once

#include "ops/tree_attention/cuda/dispatch_shape.h"
#include "ops/tree_attention/cuda/backward/per_parent/key_gradient.cuh"
#include "ops/tree_attention/cuda/backward/per_parent/parent_gradient.cuh"
#include "ops/tree_attention/cuda/backward/per_query/query_gradient.cuh"
#include "ops/tree_attention/attention/shared_bytes.h"

namespace htree::tree_attention {

template <typename T, int kKeyDim, int kValueDim, int kTiles>
void launch_query_gradient_tiles(const QueryGradientParams& params, cudaStream_t stream) {
  auto kernel = query_gradient_kernel<T, kKeyDim, kValueDim, kTiles>;
  constexpr int kBytes = QueryGradientRing<kKeyDim, kValueDim>::kSharedBytes;
  allow_shared_bytes(kernel, kBytes);
  const GatherParams& p = params.common.gather;
  const dim3 grid((p.num_queries + kQueryGradientWarps - 1) / kQueryGradientWarps,
                  p.num_batches * p.num_kv_heads);
  kernel<<<grid, kQueryGradientWarps * 32, kBytes, stream>>>(params);
}

template <typename T, int kKeyDim, int kValueDim>
void launch_query_gradient_instance(const QueryGradientParams& params, cudaStream_t stream) {
  dispatch_head_tiles(params.common.gather.group, [&](auto tiles) {
    launch_query_gradient_tiles<T, kKeyDim, kValueDim, decltype(tiles)::value>(params, stream);
  });
}

template <typename T, int kKeyDim, int kValueDim>
void launch_key_gradient_instance(const KeyGradientParams& params, cudaStream_t stream) {
  auto kernel = key_gradient_kernel<T, kKeyDim, kValueDim>;
  constexpr int kBytes = KeyGradientStage<kKeyDim, kValueDim>::kSharedBytes;
  allow_shared_bytes(kernel, kBytes);
  const GatherParams& p = params.common.gather;
  kernel<<<dim3(static_cast<unsigned>(p.num_parents), p.num_batches * p.num_kv_heads), kKeyGradientWarps * 32,
           kBytes, stream>>>(params);
}

template <typename T, int kDim, int kWarps>
void launch_parent_gradient_warps(const KeyGradientParams& params, cudaStream_t stream) {
  auto kernel = parent_gradient_kernel<T, kDim, kWarps>;
  constexpr int kBytes = kWarps * UserStage<kDim>::kWarpBytes;
  allow_shared_bytes(kernel, kBytes);
  const GatherParams& p = params.common.gather;
  const dim3 grid(static_cast<unsigned>(p.num_parents), p.num_batches * p.num_kv_heads);
  kernel<<<grid, kWarps * 32, kBytes, stream>>>(params);
}

template <typename T, int kDim>
void launch_parent_gradient_instance(const KeyGradientParams& params, cudaStream_t stream) {
  if (params.entries) {
    launch_parent_gradient_warps<T, kDim, 1>(params, stream);
  } else {
    launch_parent_gradient_warps<T, kDim, kSharedParentWarps>(params, stream);
  }
}

#define HTREE_TREE_GRADIENT_INSTANCES(PREFIX, T, DIM)                                                 \
  PREFIX template void launch_query_gradient_instance<T, DIM, DIM>(const QueryGradientParams& params, \
                                                                   cudaStream_t stream);              \
  PREFIX template void launch_key_gradient_instance<T, DIM, DIM>(const KeyGradientParams& params,     \
                                                                 cudaStream_t stream);                \
  PREFIX template void launch_parent_gradient_instance<T, DIM>(const KeyGradientParams& params,       \
                                                               cudaStream_t stream);

}  // namespace htree::tree_attention
