// Launches of the kernels whose shape is a template argument; each instance file makes one head dim.
#pragma once

#include "ops/tree_attention/cuda/forward/per_query/per_query_attend.cuh"
#include "ops/tree_attention/cuda/dispatch_shape.h"
#include "ops/tree_attention/cuda/tree/packed_layer.cuh"
#include "ops/tree_attention/cuda/select/list_scores.cuh"
#include "ops/tree_attention/attention/shared_bytes.h"

namespace htree::tree_attention {

template <typename T, int kKeyDim, int kValueDim>
void launch_relay_instance(const RelayParams& params, cudaStream_t stream) {
  const int64_t rows = params.num_batches * params.num_kv_heads * params.num_parents * kBlockRows;
  relay_kernel<T, kKeyDim, kValueDim>
      <<<static_cast<unsigned>((rows + kRelayWarps - 1) / kRelayWarps), kRelayWarps * 32, 0, stream>>>(
          params);
}

template <typename T, int kKeyDim, int kValueDim, int kTiles>
void launch_scores_tiles(const ScoreParams& params, cudaStream_t stream) {
  auto kernel = scores_kernel<T, kKeyDim, kTiles>;
  constexpr int kBytes = ScoreRing<kKeyDim>::kSharedBytes;
  allow_shared_bytes(kernel, kBytes);
  const GatherParams& p = params.gather;
  const dim3 grid((p.num_lists + kScoreWarps - 1) / kScoreWarps, p.num_batches * p.num_kv_heads,
                  static_cast<unsigned>(params.num_runs));
  kernel<<<grid, kScoreWarps * 32, kBytes, stream>>>(params, ParentBlock<kKeyDim, kValueDim>::kBytes);
}

template <typename T, int kKeyDim, int kValueDim>
void launch_scores_instance(const ScoreParams& params, cudaStream_t stream) {
  dispatch_head_tiles(params.gather.group, [&](auto tiles) {
    launch_scores_tiles<T, kKeyDim, kValueDim, decltype(tiles)::value>(params, stream);
  });
}

template <typename T, int kKeyDim, int kValueDim, int kTiles>
void launch_attend_tiles(const AttendParams& params, cudaStream_t stream) {
  auto kernel = attend_kernel<T, kKeyDim, kValueDim, kTiles>;
  constexpr int kBytes = AttendRing<kKeyDim, kValueDim>::kSharedBytes;
  allow_shared_bytes(kernel, kBytes);
  const GatherParams& p = params.gather;
  const dim3 grid((p.num_queries + kAttendWarps - 1) / kAttendWarps, p.num_batches * p.num_kv_heads);
  kernel<<<grid, kAttendWarps * 32, kBytes, stream>>>(params);
}

template <typename T, int kKeyDim, int kValueDim>
void launch_attend_instance(const AttendParams& params, cudaStream_t stream) {
  dispatch_head_tiles(params.gather.group, [&](auto tiles) {
    launch_attend_tiles<T, kKeyDim, kValueDim, decltype(tiles)::value>(params, stream);
  });
}

#define HTREE_TREE_ATTENTION_INSTANCES(PREFIX, T, DIM)                                                      \
  PREFIX template void launch_relay_instance<T, DIM, DIM>(const RelayParams& params, cudaStream_t stream);  \
  PREFIX template void launch_scores_instance<T, DIM, DIM>(const ScoreParams& params, cudaStream_t stream); \
  PREFIX template void launch_attend_instance<T, DIM, DIM>(const AttendParams& params, cudaStream_t stream);

}  // namespace htree::tree_attention
