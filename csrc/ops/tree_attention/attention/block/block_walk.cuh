// Which parents a producer warp of block_attend.cuh brings, tile after tile.
#pragma once

#include "device/reduce.cuh"
#include "ops/tree_attention/attention/block/block_task.cuh"

namespace htree::tree_attention {

// One parent on its way, in few registers; all lanes hold the same but `scale`.
struct SlotSource {
  uint32_t parent;  // among those of all batches and kv heads
  int slot;         // place in the list
  // Bits 0-15: children that take part for some query; 16-20 and 21-25: how many of the own parent's take
  // part for the first and for the last query.
  uint32_t bits;
  float scale;  // lane c < 16: undoes the power of two of child c

  static constexpr uint32_t kOwn = 1u << 26;     // it is the queries' own parent
  static constexpr uint32_t kExists = 1u << 27;  // not past the end of the list

  __device__ __forceinline__ bool exists() const { return bits & kExists; }
  __device__ __forceinline__ bool own() const { return bits & kOwn; }
  __device__ __forceinline__ int own_first() const { return bits >> 16 & 31; }
  __device__ __forceinline__ int own_last() const { return bits >> 21 & 31; }
};

// Walks the tiles of all tasks of this thread block, from the last slot of a list to its first.
template <typename Tile>
class SlotWalk {
 public:
  using Block = ParentBlock<Tile::kKeyDim, Tile::kValueDim>;

  __device__ __forceinline__ SlotWalk(const AttendParams& params, int warp)
      : params_(params), num_tasks_(num_block_tasks<Tile>(params)), task_idx_(blockIdx.x), warp_(warp) {
    start();
  }

  __device__ __forceinline__ bool done() const { return task_idx_ >= num_tasks_; }

  // The warp's parent of the next tile; not after done().
  __device__ __forceinline__ SlotSource next() {
    const int lane = threadIdx.x % 32;
    SlotSource source;
    const int slot = num_slots_ - 1 - tile_ * kTileSlots - warp_;
    const uint32_t id = __shfl_sync(device::kFullMask, ids_, tile_ % 32);
    source.parent = first_parent_ + id;
    source.slot = max(slot, 0);
    source.bits = 0;
    source.scale = 1.f;
    if (slot >= 0) {
      uint32_t present = TileNote::kAll;
      if (selected_) {
        present ^= selected_[slot];
      }
      if (tile_ == 0 && warp_ == 0) {
        present = (present & ((1u << (own_bits_ >> 21 & 31)) - 1u)) | own_bits_;
      }
      source.bits = present | SlotSource::kExists;
      if (lane < kBlockRows) {
        source.scale = reinterpret_cast<const float*>(
            params_.gather.blocks + int64_t{source.parent} * Block::kBytes + Block::kScaleOffset)[lane];
      }
    }
    ++tile_;
    if (tile_ * kTileSlots >= num_slots_) {
      task_idx_ += gridDim.x;
      start();
    } else if (tile_ % 32 == 0) {
      ids_ = later_ids_;
      later_ids_ = read_ids(tile_ + 32);
    }
    return source;
  }

 private:
  // The first task from task_idx_ on that has slots.
  __device__ __forceinline__ void start() {
    const GatherParams& p = params_.gather;
    for (; task_idx_ < num_tasks_; task_idx_ += gridDim.x) {
      const BlockTask task = block_task<Tile>(params_, task_idx_);
      if (task.num_slots == 0) {
        continue;
      }
      num_slots_ = task.num_slots;
      tile_ = 0;
      own_bits_ = static_cast<uint32_t>(task.own_first << 16 | task.own_last << 21) | SlotSource::kOwn;
      first_parent_ = task.head_index * static_cast<uint32_t>(p.num_parents);
      const int batch = task.head_index / p.num_kv_heads, kv_head = task.head_index % p.num_kv_heads;
      const int64_t row = static_cast<int64_t>(task.list_row) * p.num_kv_heads + kv_head;
      list_ = p.lists ? p.lists + batch * p.list_batch + row * p.list_width : nullptr;
      selected_ = params_.selected
                      ? reinterpret_cast<const uint16_t*>(params_.selected + batch * params_.selected_batch +
                                                          row * params_.mask_words)
                      : nullptr;
      ids_ = read_ids(0);
      later_ids_ = read_ids(32);
      return;
    }
  }

  // Lane i gets the warp's parent of tile `first` + i.
  __device__ __forceinline__ int read_ids(int first) const {
    const int slot = num_slots_ - 1 - (first + static_cast<int>(threadIdx.x % 32)) * kTileSlots - warp_;
    const int last_parent = static_cast<int>(params_.gather.num_parents - 1);
    return slot < 0 ? 0 : min(max(list_ ? list_[slot] : slot, 0), last_parent);
  }

  const AttendParams& params_;
  int num_tasks_, task_idx_, warp_;
  int num_slots_, tile_;
  uint32_t own_bits_, first_parent_;
  const int32_t* list_;
  const uint16_t* selected_;
  int ids_, later_ids_;
};

}  // namespace htree::tree_attention
