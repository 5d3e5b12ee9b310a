// What a block of attend.cuh works on: its list and rows, its sizes and its shared memory
// (docs/semantics/tree_attention.md §1.3, §1.12).
//
// A tile is 8 parents, 128 keys, one parent per producer warp. With 128 rows each of the two
// consumer warpgroups multiplies 64 rows by every tile. With 64 rows they take turns at the tiles
// and merge their results.
#pragma once

#include "device/sm90/mbarrier.cuh"
#include "ops/sparse_attention/cuda/attend.h"
#include "ops/tree/cuda/sm80/gather.cuh"
#include "ops/tree/cuda/sm80/packed_layer.cuh"

namespace htree::tree_attention {

constexpr int kTileSlots = 8;
constexpr int kTileKeys = kTileSlots * kParentRows;

// What the consumers must know of a tile beyond its keys and values.
struct alignas(16) TileNote {
  // Per slot. Bit c: child c takes part. kScaled: some key row has a power of two other than 1.
  uint32_t slots[kTileSlots];
  uint8_t exponents[kTileKeys];  // biased exponents of what undoes the powers; valid where kScaled is set
  uint32_t nonfinite;            // whether values that only some queries see were not finite and read as 0

  static constexpr uint32_t kAll = 0xffff;
  static constexpr uint32_t kScaled = 0x10000;
};

template <int kKeyDim_, int kValueDim_, int kRows_>
struct PerListTile {
  static constexpr int kKeyDim = kKeyDim_;
  static constexpr int kValueDim = kValueDim_;
  static constexpr int kRows = kRows_;  // (query, head) pairs of a block
  static_assert(kRows == 64 || kRows == 128);
  static constexpr bool kSplitKeys = kRows == 64;
  static constexpr int kTileStep = kSplitKeys ? 2 : 1;  // from one tile of a consumer warpgroup to its next

  static constexpr int kProducerGroups = 2;
  static constexpr int kConsumerGroups = 2;
  static constexpr int kThreads = 128 * (kProducerGroups + kConsumerGroups);
  static_assert(kProducerGroups * 4 == kTileSlots);
  static constexpr int kProducerRegisters = 56;
  static constexpr int kConsumerRegisters = 200;
  static constexpr int kLaunchRegisters = 65536 / kThreads;
  static_assert(128 * (kProducerGroups * kProducerRegisters + kConsumerGroups * kConsumerRegisters) <=
                    kThreads * kLaunchRegisters,
                "raise_registers would wait for ever");

  static constexpr int kStages = 3;
  // A note is needed longer than the keys of its tile, until the consumers' iteration ends: it is written
  // again only after the keys of the same warpgroup's next tile have been read.
  static constexpr int kNotes = 8;
  static_assert(kNotes >= kStages + kTileStep);

  static constexpr int kQueryBytes = kRows * kKeyDim * 2;
  static constexpr int kKeyBytes = kTileKeys * kKeyDim * 2;
  static constexpr int kValueBytes = kTileKeys * kValueDim * 2;
  static constexpr int kSlotKeyBytes = kParentRows * kKeyDim * 2;
  static constexpr int kSlotValueBytes = kParentRows * kValueDim * 2;
  // Half of the output of 64 rows in fp32. The other half goes where the queries were.
  static constexpr int kExchangeBytes = kSplitKeys ? 64 * kValueDim * 2 : 0;
  static_assert(!kSplitKeys || kExchangeBytes <= kQueryBytes);
};

template <typename Tile>
struct PerListShared {
  char query[Tile::kQueryBytes + Tile::kExchangeBytes];
  char keys[Tile::kStages][Tile::kKeyBytes];
  char values[Tile::kStages][Tile::kValueBytes];
  float unscale[Tile::kRows];  // undoes a query row's power of two, times the scale of the scores
  float2 states[Tile::kSplitKeys ? 2 * 64 : 1];  // max and sum of the two warpgroups that split the keys
  TileNote notes[Tile::kNotes];
  device::Barrier keys_landed[Tile::kStages][kTileSlots];  // copy of one producer warp
  device::Barrier keys_full[Tile::kStages];                // rotated keys of all warps
  device::Barrier keys_empty[Tile::kStages];
  device::Barrier values_full[Tile::kStages];
  device::Barrier values_empty[Tile::kStages];
};

enum PerListBarrier : int {
  kQueryReady = 1,  // and kQueryReady + 1: one per consumer warpgroup
  kGroupsMeet = 3,
};

// A list and kRows of its (query, head) pairs. The queries of a list all have the same diagonal parent.
struct ListTask {
  int head_index;  // batch * kv heads + kv head
  int list_row;
  int row_tile;
  int first_query;  // of the list, counted in the chunk
  int num_queries;
  int num_slots;  // m; 0 when everything is selected and nothing takes part
  int num_tiles;
  // Children of the last parent, which is the diagonal one or seen whole, that take part for the first and for the last
  // query of the list.
  int own_first, own_last;
};

__host__ __device__ inline int list_row_tiles(const GatherParams& p, int rows) {
  return (p.stride * p.group + rows - 1) / rows;
}

// Kv heads are outermost, so that the keys and values of one head stay in the L2. Long lists come first.
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
  const int64_t diagonal_parent = first / kParentRows;
  task.num_slots = static_cast<int>(min(int64_t{p.list_width}, diagonal_parent + 1));
  const int excluded = params.selected ? 1 : 0;  // the query's diagonal block is always selected
  task.own_first = static_cast<int>(first % kParentRows) + 1 - excluded;
  task.own_last = static_cast<int>(last % kParentRows) + 1 - excluded;
  if (params.selected && (task.num_slots - 1) * kParentRows + task.own_last + 1 <= p.list_width) {
    task.num_slots = 0;
  }
  if (p.list_sizes) {
    const int size = p.list_sizes[list_number(p, task.head_index / p.num_kv_heads, task.list_row,
                                              task.head_index % p.num_kv_heads)];
    task.num_slots = list_entries(size);
    task.own_first = size < 0 ? kParentRows : task.own_first;
    task.own_last = size < 0 ? kParentRows : task.own_last;
  }
  task.num_tiles = (task.num_slots + kTileSlots - 1) / kTileSlots;
  return task;
}

template <typename Tile>
__host__ __device__ inline int num_list_tasks(const AttendParams& params) {
  const GatherParams& p = params.gather;
  return list_row_tiles(p, Tile::kRows) * p.num_lists * p.num_batches * p.num_kv_heads;
}

// Stage of the ring and phase of its barriers for tile `tile_idx`, counted over all tasks
// of this thread block.
template <typename Tile>
__device__ __forceinline__ int stage_of(unsigned tile_idx) {
  return static_cast<int>(tile_idx % Tile::kStages);
}
template <typename Tile>
__device__ __forceinline__ uint32_t phase_of(unsigned tile_idx) {
  return tile_idx / Tile::kStages & 1;
}

// The (query, head) pair that a row of a block stands for.
struct ListRow {
  bool exists;
  int query;  // counted in the chunk
  int head;   // among the G heads of the kv head

  template <typename Tile>
  __device__ __forceinline__ static ListRow of(const GatherParams& p, const ListTask& task, int row) {
    const int pair = task.row_tile * Tile::kRows + row;
    const int local = pair / p.group;
    return {local < task.num_queries, task.first_query + local, pair - local * p.group};
  }
};

// The row of the block that a consumer thread's accumulators with h = 0, 1 belong to.
template <typename Tile>
__device__ __forceinline__ int accumulator_row(int group, int thread, int h) {
  return (Tile::kSplitKeys ? 0 : group * 64) + thread / 32 * 16 + thread % 32 / 4 + 8 * h;
}

}  // namespace htree::tree_attention
