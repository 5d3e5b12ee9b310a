// Where the choice of blocks keeps the keys of a row. Only *_cuda.cpp files include this.
#pragma once

#include <algorithm>

#include "ops/selection/cuda/any/block_params.h"
#include "ops/selection/cuda/any/select_plan.h"
#include "ops/selection/plan/block_launch.h"
#include "ops/tree/cuda/any/cuda_tensors.h"

namespace htree::tree_attention {

// The memory of keys that do not fit into shared memory, for rows of up to `blocks` blocks, and the thread blocks that
// share it. `scratch` is made where it is needed first; later calls need no more.
inline void place_keys(BlockListParams& params, int64_t blocks, const at::Tensor& like, at::Tensor& scratch) {
  const int64_t num_rows = static_cast<int64_t>(params.chunk.num_slots) * params.chunk.num_heads;
  params.key_capacity = blocks;
  params.num_blocks = std::min<int64_t>(num_rows, INT32_MAX);
  params.keys = nullptr;
  if (row_shared_bytes(blocks, /*holds_keys=*/true) <= shared_limit()) {
    return;
  }
  params.num_blocks =
      std::min(params.num_blocks, std::clamp<int64_t>(kKeyScratchBytes / (blocks * 4), 1, kScratchBlocks));
  if (!scratch.defined()) {
    scratch = device_scratch(params.num_blocks * blocks * 4, like);
  }
  params.keys = static_cast<uint32_t*>(scratch.mutable_data_ptr());
}

}  // namespace htree::tree_attention
