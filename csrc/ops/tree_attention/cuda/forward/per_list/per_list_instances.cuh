// Launches of block_attend_kernel; each instance file makes one head dim.
#pragma once

#include <algorithm>

#include "ops/tree_attention/cuda/forward/per_list/per_list_attend.cuh"
#include "ops/tree_attention/attention/shared_bytes.h"

namespace htree::tree_attention {

template <typename T, int kDim, int kRows>
void launch_block_attend_rows(const AttendParams& params, cudaStream_t stream) {
  using Tile = BlockTile<kDim, kDim, kRows>;
  auto kernel = block_attend_kernel<T, Tile>;
  constexpr int kBytes = sizeof(BlockShared<Tile>);
  allow_shared_bytes(kernel, kBytes);
  int device = 0, num_sms = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  const int num_blocks = std::min(num_block_tasks<Tile>(params), num_sms);
  kernel<<<num_blocks, Tile::kThreads, kBytes, stream>>>(params);
}

template <typename T, int kDim>
void launch_block_attend_instance(const AttendParams& params, cudaStream_t stream) {
  if (params.gather.stride * params.gather.group <= 64) {
    launch_block_attend_rows<T, kDim, 64>(params, stream);
  } else {
    launch_block_attend_rows<T, kDim, 128>(params, stream);
  }
}

#define HTREE_BLOCK_INSTANCES(PREFIX, T, DIM) \
  PREFIX template void launch_block_attend_instance<T, DIM>(const AttendParams& params, cudaStream_t stream);

}  // namespace htree::tree_attention
