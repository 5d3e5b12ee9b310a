// Launches of the kernels of block_gradient.cuh and partial_sum.cuh; each instance file makes one head dim.
#pragma once

#include <algorithm>

#include "ops/tree_attention/cuda/backward/per_list/per_list_gradient.cuh"
#include "ops/tree_attention/cuda/backward/per_list/partial_sum.cuh"
#include "ops/tree_attention/attention/shared_bytes.h"

namespace htree::tree_attention {

template <typename T, int kDim>
void launch_block_gradient_instance(const BlockGradientParams& params, cudaStream_t stream) {
  using Tile = GradientTile<kDim>;
  auto kernel = block_gradient_kernel<T, Tile>;
  constexpr int kBytes = sizeof(GradientShared<Tile>);
  allow_shared_bytes(kernel, kBytes);
  int device = 0, num_sms = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  const unsigned num_blocks = static_cast<unsigned>(std::min<int64_t>(params.num_tasks, num_sms));
  kernel<<<num_blocks, Tile::kThreads, kBytes, stream>>>(params);
}

template <typename T, int kDim>
void launch_partial_sums_instance(const PartialSumParams& params, cudaStream_t stream) {
  const BlockGradientParams& b = params.blocks;
  const int64_t per_head = int64_t{b.gather.num_lists} * blocks_per_list(b.gather);
  const int64_t heads = (b.first_task + b.num_tasks - 1) / per_head - b.first_task / per_head + 1;
  // parents up to the last list's own
  const int64_t last_list = (b.first_task + b.num_tasks - 1) % per_head / blocks_per_list(b.gather);
  const int64_t reached =
      heads > 1 ? b.gather.num_parents
                : (b.gather.t0 - b.lead + last_list * b.gather.stride) / b.gather.node_span / kBlockRows + 1;
  const dim3 grid(static_cast<unsigned>(reached), static_cast<unsigned>(heads));
  partial_sum_kernel<T, kDim><<<grid, SumShape<kDim>::kWarps * 32, 0, stream>>>(params);
}

#define HTREE_BLOCK_GRADIENT_INSTANCES(PREFIX, T, DIM)                                           \
  PREFIX template void launch_block_gradient_instance<T, DIM>(const BlockGradientParams& params, \
                                                              cudaStream_t stream);              \
  PREFIX template void launch_partial_sums_instance<T, DIM>(const PartialSumParams& params,      \
                                                            cudaStream_t stream);

}  // namespace htree::tree_attention
