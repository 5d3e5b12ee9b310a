// The launches of block_gradient_launch.h over the tasks of a layer, as many at a time as their partial sums
// fit the scratch.
#pragma once

#include <algorithm>

#include "ops/tree_attention/attention/block_gradient/block_gradient_launch.h"

namespace htree::tree_attention {

// Lists whose partial sums fit `budget` bytes; at least one.
inline int64_t partial_sum_lists(int64_t budget, int64_t blocks, int64_t slots, int64_t bytes) {
  return std::max<int64_t>(1, budget / (blocks * slots * bytes));
}

struct BlockLayerParams {
  PartialSumParams sums;     // without partials, first_task and num_tasks; keys and values may be null
  int64_t blocks = 1;        // of kGradientRows rows per list
  char* partials = nullptr;  // partial_bytes of them
  int64_t partial_bytes = 0;
};

inline cudaError_t run_block_layer(const TensorCoreShape& shape, const BlockLayerParams& layer,
                                   cudaStream_t stream) {
  PartialSumParams sums = layer.sums;
  BlockGradientParams& b = sums.blocks;
  const GatherParams& p = b.gather;
  const bool keys_wanted = sums.keys || sums.values;
  const int64_t num_lists = int64_t{p.num_batches} * p.num_kv_heads * p.num_lists;
  const int64_t step = keys_wanted ? partial_sum_lists(layer.partial_bytes, layer.blocks, b.partial_slots,
                                                       partial_sum_bytes(shape.key_dim, shape.value_dim))
                                   : num_lists;
  b.partials = keys_wanted ? layer.partials : nullptr;
  for (int64_t first = 0; first < num_lists; first += step) {
    b.first_task = first * layer.blocks;
    b.num_tasks = std::min(step, num_lists - first) * layer.blocks;
    launch_block_gradient(shape, b, stream);
    cudaError_t error = cudaGetLastError();
    if (keys_wanted && error == cudaSuccess) {
      launch_partial_sums(shape, sums, stream);
      error = cudaGetLastError();
    }
    if (error != cudaSuccess) {
      return error;
    }
  }
  return cudaSuccess;
}

}  // namespace htree::tree_attention
