// Launches of the top layer's kernels whose shape is a template argument; each instance file makes one head
// dim.
#pragma once

#include "ops/tree_attention/cuda/dispatch_shape.h"
#include "ops/tree_attention/attention/shared_bytes.h"
#include "ops/tree_attention/cuda/forward/dense_top/dense_attend.cuh"
#include "ops/tree_attention/cuda/select/dense_importances.cuh"
#include "ops/tree_attention/cuda/select/dense_references.cuh"
#include "ops/tree_attention/cuda/tree/dense_layer.cuh"

namespace htree::tree_attention {

template <typename T, int kDim>
void launch_top_relay_instance(const TopRelayParams& params, cudaStream_t stream) {
  const int64_t tiles = params.num_batches * params.num_kv_heads * params.tiles.num_tiles;
  top_relay_kernel<T, kDim><<<static_cast<unsigned>(tiles), kTopRelayWarps * 32, 0, stream>>>(params);
}

inline dim3 score_grid(const GatherParams& p) {
  const int lists = kScoreRows / p.group;
  return dim3(static_cast<unsigned>((p.num_lists + lists - 1) / lists * p.num_kv_heads), p.num_batches);
}

template <typename T, int kDim>
void launch_top_references_instance(const TopReferenceParams& params, cudaStream_t stream) {
  auto kernel = top_references_kernel<T, kDim>;
  allow_shared_bytes(kernel, kScoreSharedBytes<kDim>);
  kernel<<<score_grid(params.gather), kScoreThreads, kScoreSharedBytes<kDim>, stream>>>(params);
}

template <typename T, int kDim>
void launch_top_importances_instance(const TopImportanceParams& params, cudaStream_t stream) {
  const GatherParams& p = params.reference.gather;
  dispatch_dense_group(p.group, [&](auto group) {
    auto kernel = top_importance_kernel<T, kDim, decltype(group)::value>;
    allow_shared_bytes(kernel, kScoreSharedBytes<kDim>);
    kernel<<<score_grid(p), kScoreThreads, kScoreSharedBytes<kDim>, stream>>>(params);
  });
}

template <typename T, int kDim, int kGroups>
void launch_top_attend_groups(const TopAttendParams& params, cudaStream_t stream) {
  auto kernel = top_attend_kernel<T, kDim, kGroups>;
  allow_shared_bytes(kernel, kAttendSharedBytes<kDim, kGroups>);
  const GatherParams& p = params.attend.gather;
  const int64_t tokens = attend_tokens(p.group);
  const int64_t runs = (p.t0 + p.num_queries - 1) / tokens - p.t0 / tokens + 1;
  const dim3 grid(static_cast<unsigned>(runs * p.num_kv_heads), p.num_batches);
  kernel<<<grid, 128 * (kGroups + 1), kAttendSharedBytes<kDim, kGroups>, stream>>>(params);
}

template <typename T, int kDim>
void launch_top_attend_instance(const TopAttendParams& params, cudaStream_t stream) {
  if (attend_groups(params.attend.gather.group) == 2) {
    launch_top_attend_groups<T, kDim, 2>(params, stream);
  } else {
    launch_top_attend_groups<T, kDim, 1>(params, stream);
  }
}

#define HTREE_TOP_INSTANCES(PREFIX, T, DIM)                                                                  \
  PREFIX template void launch_top_relay_instance<T, DIM>(const TopRelayParams& params, cudaStream_t stream); \
  PREFIX template void launch_top_references_instance<T, DIM>(const TopReferenceParams& params,              \
                                                              cudaStream_t stream);                          \
  PREFIX template void launch_top_importances_instance<T, DIM>(const TopImportanceParams& params,            \
                                                               cudaStream_t stream);                         \
  PREFIX template void launch_top_attend_instance<T, DIM>(const TopAttendParams& params, cudaStream_t stream);

}  // namespace htree::tree_attention
