// The rows of a block: which (query, head) pair one stands for, and which of them a thread holds.
#pragma once

#include "ops/tree_attention/cuda/forward/per_list/per_list_task.cuh"

namespace htree::tree_attention {

// One (query, head) pair of a block.
struct ListRow {
  bool exists;
  int query;  // in the chunk
  int head;   // of the kv head's group

  template <typename Tile>
  __device__ __forceinline__ static ListRow of(const GatherParams& p, const ListTask& task, int row) {
    const int pair = task.row_tile * Tile::kRows + row;
    const int local = pair / p.group;
    return {local < task.num_queries, task.first_query + local, pair - local * p.group};
  }
};

// The row of the block that accumulators with h = 0, 1 of a consumer's thread belong to.
template <typename Tile>
__device__ __forceinline__ int accumulator_row(int group, int thread, int h) {
  return (Tile::kSplitKeys ? 0 : group * 64) + thread / 32 * 16 + thread % 32 / 4 + 8 * h;
}

}  // namespace htree::tree_attention
