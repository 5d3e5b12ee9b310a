// The launches of block_gradient_launch.h over the tasks of a layer, as many at a time as their partial sums
// fit the scratch.
#pragma once

#include <algorithm>

#include "ops/tree_attention/cuda/backward/per_list/per_list_gradient.h"
#include "ops/tree_attention/cuda/dispatch_shape.h"

namespace htree::tree_attention {

// Lists whose partial sums fit `budget` bytes; at least one.
inline int64_t partial_sum_lists(int64_t budget, int64_t tasks, int64_t slots, int64_t bytes) {
  return std::max<int64_t>(1, budget / (tasks * slots * bytes));
}

struct PerListLayerParams {
  PartialSumParams sums;     // without partials, first_task and num_tasks; keys and values may be null
  int64_t tasks = 1;         // of kGradientRows rows per list
  char* partials = nullptr;  // partial_bytes of them
  int64_t partial_bytes = 0;
  int64_t num_sms = 1;
};

// Lists from `first` on, counted over all heads, whose partial sums fit `slots` of them together; `most` is
// how many slots each of them may need. Without lists, later queries need more of them. A thread block takes
// one list at a time, so that a launch has a multiple of `wave` lists, as many as run together, if it can.
struct ListRun {
  int64_t lists, most;
};
inline ListRun next_lists(const PerListGradientParams& b, int64_t first, int64_t num_lists, int64_t slots,
                          int64_t wave) {
  const GatherParams& p = b.gather;
  const int64_t row = first % p.num_lists, left = num_lists - first;
  const auto needed = [&](int64_t lists) {
    if (p.lists) {
      return b.partial_slots;  // a caller's list may hold more than it should
    }
    const int64_t last_row = std::min(row + lists, int64_t{p.num_lists}) - 1;
    return (p.t0 - b.lead + last_row * p.stride) / p.node_span / kTensorCoreRate + 1;
  };
  int64_t low = 1, high = left;  // at least one list
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (middle * needed(middle) <= slots) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  const int64_t lists = low < left && low > wave ? low / wave * wave : low;
  return {lists, needed(lists)};
}

inline cudaError_t run_per_list_layer(const TensorCoreShape& shape, const PerListLayerParams& layer,
                                      cudaStream_t stream) {
  PartialSumParams sums = layer.sums;
  PerListGradientParams& b = sums.tasks;
  const GatherParams& p = b.gather;
  const bool keys_wanted = sums.keys || sums.values;
  const int64_t num_lists = int64_t{p.num_batches} * p.num_kv_heads * p.num_lists;
  const int64_t slots =
      layer.partial_bytes / (layer.tasks * partial_sum_bytes(shape.key_dim, shape.value_dim));
  const int64_t wave = std::max<int64_t>(1, layer.num_sms / layer.tasks);
  const PerListGradientParams all = b;
  b.partials = keys_wanted ? layer.partials : nullptr;
  for (int64_t first = 0; first < num_lists;) {
    const ListRun run = keys_wanted ? next_lists(all, first, num_lists, slots, wave) : ListRun{num_lists, 1};
    b.partial_slots = run.most;
    b.first_task = first * layer.tasks;
    b.num_tasks = run.lists * layer.tasks;
    first += run.lists;
    cudaError_t error = dispatch_shape(shape, [&](auto type, auto dim) {
      return launch_per_list_gradient<typename decltype(type)::type, dim.value>(b, stream);
    });
    if (keys_wanted && error == cudaSuccess) {
      error = dispatch_shape(shape, [&](auto type, auto dim) {
        return launch_partial_sums<typename decltype(type)::type, dim.value>(sums, stream);
      });
    }
    if (error != cudaSuccess) {
      return error;
    }
  }
  return cudaSuccess;
}

}  // namespace htree::tree_attention
