// Launches of union_attend.cuh; each instance file makes one head dim and dtype.
#pragma once

#include "ops/tree_attention/cuda/dispatch_shape.h"
#include "ops/tree_attention/attention/shared_bytes.h"
#include "ops/tree_attention/cuda/forward/shared_gather/shared_gather_attend.cuh"

namespace htree::tree_attention {

template <typename T, int kKeyDim, int kValueDim, int kTiles, bool kSelected>
void launch_union_kernel(const AttendParams& params, cudaStream_t stream) {
  using Shape = UnionShape<kKeyDim, kValueDim, kTiles>;
  auto kernel = union_attend_kernel<T, kKeyDim, kValueDim, kTiles, kSelected>;
  constexpr int kBytes = static_cast<int>(sizeof(typename Shape::Shared));
  allow_shared_bytes(kernel, kBytes);
  const GatherParams& p = params.gather;
  const dim3 grid((p.num_queries + Shape::kWarps - 1) / Shape::kWarps, p.num_batches * p.num_kv_heads);
  kernel<<<grid, Shape::kThreads, kBytes, stream>>>(params);
}

template <typename T, int kKeyDim, int kValueDim, int kTiles>
void launch_union_tiles(const AttendParams& params, cudaStream_t stream) {
  if (params.selected) {
    launch_union_kernel<T, kKeyDim, kValueDim, kTiles, true>(params, stream);
  } else {
    launch_union_kernel<T, kKeyDim, kValueDim, kTiles, false>(params, stream);
  }
}

template <typename T, int kKeyDim, int kValueDim>
void launch_union_instance(const AttendParams& params, cudaStream_t stream) {
  dispatch_head_tiles(params.gather.group, [&](auto tiles) {
    launch_union_tiles<T, kKeyDim, kValueDim, decltype(tiles)::value>(params, stream);
  });
}

#define HTREE_UNION_INSTANCES(PREFIX, T, DIM) \
  PREFIX template void launch_union_instance<T, DIM, DIM>(const AttendParams& params, cudaStream_t stream);

}  // namespace htree::tree_attention
