// Which parents a producer warp of per_list_attend.cuh brings, tile after tile.
#pragma once

#include "device/reduce.cuh"
#include "ops/tree_attention/cuda/forward/per_list/per_list_row.cuh"
#include "ops/tree_attention/cuda/forward/per_list/per_list_task.cuh"

namespace htree::tree_attention {

// One parent on its way, in few registers; all lanes hold the same.
struct SlotSource {
  uint32_t parent;  // among those of all batches and kv heads
  int slot;         // place in the list
  // Bits 0-15: children that take part for some query; 16-20 and 21-25: how many of the own parent's take
  // part for the first and for the last query.
  uint32_t bits;

  static constexpr uint32_t kOwn = 1u << 26;     // it is the queries' own parent
  static constexpr uint32_t kExists = 1u << 27;  // not past the end of the list
  static constexpr uint32_t kInTile = 1u << 28;  // of a tile, be it past the end of its list

  __device__ __forceinline__ bool in_tile() const { return bits & kInTile; }
  __device__ __forceinline__ bool exists() const { return bits & kExists; }
  __device__ __forceinline__ bool own() const { return bits & kOwn; }
  __device__ __forceinline__ int own_first() const { return bits >> 16 & 31; }
  __device__ __forceinline__ int own_last() const { return bits >> 21 & 31; }
};

// Walks the tiles of all tasks of this thread block, from the last slot of a list to its first.
template <typename Tile>
class SlotWalk {
 public:
  using Block = PackedParent<Tile::kKeyDim, Tile::kValueDim>;

  __device__ __forceinline__ SlotWalk(const AttendParams& params, int warp)
      : params_(params), task_idx_(blockIdx.x), warp_(warp) {
    start();
  }

  __device__ __forceinline__ bool done() const { return task_idx_ >= num_list_tasks<Tile>(params_); }

  // The warp's parent of the next tile; not after done().
  __device__ __forceinline__ SlotSource next() {
    SlotSource source;
    const int slot = num_slots_ - 1 - tile_ * kTileSlots - warp_;
    source.parent = __shfl_sync(device::kFullMask, parents_, tile_ % 32);
    uint32_t present = __shfl_sync(device::kFullMask, present_, tile_ % 32);
    source.slot = max(slot, 0);
    source.bits = SlotSource::kInTile;
    if (slot >= 0) {
      if (tile_ == 0 && warp_ == 0) {
        present = (present & ((1u << (own_bits_ >> 21 & 31)) - 1u)) | own_bits_;
      }
      source.bits |= present | SlotSource::kExists;
    }
    ++tile_;
    if (tile_ * kTileSlots >= num_slots_) {
      if (!params_.first) {
        prefetch_state(list_task<Tile>(params_, task_idx_));
      }
      task_idx_ += gridDim.x;
      start();
      if (!done()) {
        prefetch_queries(list_task<Tile>(params_, task_idx_));
      }
    } else if (tile_ % 32 == 0) {
      read_slots(tile_);
    }
    return source;
  }

 private:
  // The first task from task_idx_ on that has slots.
  __device__ __forceinline__ void start() {
    for (; !done(); task_idx_ += gridDim.x) {
      const ListTask task = list_task<Tile>(params_, task_idx_);
      if (task.num_slots == 0) {
        continue;
      }
      num_slots_ = task.num_slots;
      tile_ = 0;
      own_bits_ = static_cast<uint32_t>(task.own_first << 16 | task.own_last << 21) | SlotSource::kOwn;
      head_index_ = task.head_index;
      list_row_ = task.list_row;
      read_slots(0);
      return;
    }
  }

  // Lane i gets the warp's slot of tile `first` + i: its parent, and which of the children take part.
  // Addresses are made here each time, registers are short.
  __device__ __forceinline__ void read_slots(int first) {
    const GatherParams& p = params_.gather;
    const int batch = head_index_ / p.num_kv_heads, kv_head = head_index_ % p.num_kv_heads;
    const int64_t row = static_cast<int64_t>(list_row_) * p.num_kv_heads + kv_head;
    const int slot =
        max(num_slots_ - 1 - (first + static_cast<int>(threadIdx.x % 32)) * kTileSlots - warp_, 0);
    const int id = p.lists ? p.lists[batch * p.list_batch + row * p.list_width + slot] : slot;
    present_ = TileNote::kAll;
    if (params_.selected) {
      present_ ^= reinterpret_cast<const uint16_t*>(params_.selected + batch * params_.selected_batch +
                                                    row * params_.mask_words)[slot];
    }
    const int last_parent = static_cast<int>(p.num_parents - 1);
    parents_ = head_index_ * static_cast<uint32_t>(p.num_parents) + min(max(id, 0), last_parent);
  }

  static constexpr int kWarpRows = Tile::kRows / kTileSlots;

  // The consumers get to the end of the task a few tiles after this: what they read then is in the L2 by
  // then. A warp asks for an eighth of the rows.
  __device__ __forceinline__ void prefetch_state(const ListTask& task) const {
    const GatherParams& p = params_.gather;
    constexpr int kLines = Tile::kValueDim / 32;  // of 128 bytes in a row
    const int batch = task.head_index / p.num_kv_heads, kv_head = task.head_index % p.num_kv_heads;
#pragma unroll
    for (int i = threadIdx.x % 32; i < kWarpRows * kLines; i += 32) {
      const ListRow row = ListRow::of<Tile>(p, task, warp_ * kWarpRows + i / kLines);
      if (row.exists) {
        const int64_t head = int64_t{kv_head} * p.group + row.head;
        const int64_t num_heads = int64_t{p.num_kv_heads} * p.group;
        const int64_t at = row.query * num_heads + head;
        prefetch(params_.partial + (batch * int64_t{p.num_queries} * num_heads + at) * Tile::kValueDim +
                 i % kLines * 32);
        if (i % kLines == 0) {
          prefetch(params_.max + batch * params_.state_batch + at);
          prefetch(params_.sum + batch * params_.state_batch + at);
        }
      }
    }
  }

  __device__ __forceinline__ void prefetch_queries(const ListTask& task) const {
    const GatherParams& p = params_.gather;
    constexpr int kLines = (Tile::kKeyDim + 63) / 64;
    const int batch = task.head_index / p.num_kv_heads, kv_head = task.head_index % p.num_kv_heads;
    const uint16_t* rows = static_cast<const uint16_t*>(p.queries.data) + batch * p.queries.batch +
                           static_cast<int64_t>(kv_head) * p.group * p.queries.head;
#pragma unroll
    for (int i = threadIdx.x % 32; i < kWarpRows * kLines; i += 32) {
      const ListRow row = ListRow::of<Tile>(p, task, warp_ * kWarpRows + i / kLines);
      if (row.exists) {
        prefetch(rows + row.query * p.queries.row + row.head * p.queries.head + i % kLines * 64);
      }
    }
  }

  __device__ __forceinline__ static void prefetch(const void* line) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
  }

  const AttendParams& params_;
  int task_idx_, warp_;
  int num_slots_, tile_, head_index_, list_row_;
  uint32_t own_bits_;
  uint32_t parents_, present_;
};

}  // namespace htree::tree_attention
