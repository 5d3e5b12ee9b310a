// Which list and rows a block attends for: docs/semantics/tree_attention.md §1.3, §1.12.
#pragma once

#include "ops/tree_attention/cuda/forward/attend_params.h"
#include "ops/tree_attention/cuda/forward/per_list/per_list_tile.cuh"
#include "ops/tree_attention/cuda/gather_task.cuh"

namespace htree::tree_attention {

// A list and kRows of its (query, head) pairs. All queries of a list stand under the same parent of the
// layer.
struct ListTask {
  int head_index;  // batch * kv heads + kv head
  int list_row;
  int row_tile;
  int first_query;  // of the list, in the chunk
  int num_queries;
  int num_slots;  // m; 0 when everything is selected and nothing takes part
  int num_tiles;
  // Children of the own parent that take part for the first and for the last query of the list.
  int own_first, own_last;
};

__host__ __device__ inline int list_row_tiles(const GatherParams& p, int rows) {
  return (p.stride * p.group + rows - 1) / rows;
}

// Kv heads outermost, so that one head's keys and values stay in the L2; long lists first.
template <typename Tile>
__device__ __forceinline__ ListTask list_task(const AttendParams& params, int task_idx) {
  const GatherParams& p = params.gather;
  const int row_tiles = list_row_tiles(p, Tile::kRows);
  ListTask task;
  task.row_tile = task_idx % row_tiles;
  const int list_idx = task_idx / row_tiles;
  task.list_row = p.num_lists - 1 - list_idx % p.num_lists;
  task.head_index = list_idx / p.num_lists;
  task.first_query = task.list_row * p.stride;
  task.num_queries = min(p.stride, p.num_queries - task.first_query);
  const int64_t first = node_of(p, p.t0 + task.first_query);
  const int64_t last = node_of(p, p.t0 + (task.first_query + task.num_queries - 1));
  const int64_t own_parent = first / kParentRows;
  task.num_slots = static_cast<int>(min(int64_t{p.list_width}, own_parent + 1));
  const int excluded = params.selected ? 1 : 0;  // the query's own node is always selected
  task.own_first = static_cast<int>(first % kParentRows) + 1 - excluded;
  task.own_last = static_cast<int>(last % kParentRows) + 1 - excluded;
  if (params.selected && (task.num_slots - 1) * kParentRows + task.own_last + 1 <= p.list_width) {
    task.num_slots = 0;
  }
  task.num_tiles = (task.num_slots + kTileSlots - 1) / kTileSlots;
  return task;
}

template <typename Tile>
__host__ __device__ inline int num_list_tasks(const AttendParams& params) {
  const GatherParams& p = params.gather;
  return list_row_tiles(p, Tile::kRows) * p.num_lists * p.num_batches * p.num_kv_heads;
}

// Stage and phase of the tile with running number `tile_idx` of this thread block.
template <typename Tile>
__device__ __forceinline__ int stage_of(unsigned tile_idx) {
  return static_cast<int>(tile_idx % Tile::kStages);
}
template <typename Tile>
__device__ __forceinline__ uint32_t phase_of(unsigned tile_idx) {
  return tile_idx / Tile::kStages & 1;
}

}  // namespace htree::tree_attention
