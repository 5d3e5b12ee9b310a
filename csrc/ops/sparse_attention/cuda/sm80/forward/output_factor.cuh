// The end of a row's softmax over its last layer: docs/semantics/tree_attention.md §1.7, sparse_attention.md §8.
#pragma once

#include "ops/sparse_attention/cuda/attend.h"
#include "ops/tree/cuda/sm80/running_state.cuh"

namespace htree::tree_attention {

// What the sum of weighted values of a row is multiplied by. `max` is in log2 units. A caller's list may leave a row
// nothing to see; its output is 0.
__device__ __forceinline__ float output_factor(const AttendParams& params, int64_t head, float max,
                                               float sum) {
  if (params.gather.list_sizes && sum == 0.f) {
    return 0.f;
  }
  return 1.f / (params.sinks ? sum + device::exp2_flushed(params.sinks[head] / kLn2 - max) : sum);
}

}  // namespace htree::tree_attention
