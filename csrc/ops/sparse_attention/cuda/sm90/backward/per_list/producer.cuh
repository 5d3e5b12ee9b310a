// The producer warps of gradient.cuh. Warp w brings parents 2 w and 2 w + 1 of every tile into shared memory
// and, with positions by the list, rotates their keys to their places in it, R_{16 slot} K'
// (docs/semantics/tree_attention.md §1.4).
#pragma once

#include "device/sm90/tma.cuh"
#include "ops/sparse_attention/cuda/sm90/backward/per_list/task.cuh"
#include "ops/sparse_attention/cuda/sm90/forward/per_list/key_rotation.cuh"

namespace htree::tree_attention {

// Two parents of a tile, on their way to shared memory. All lanes hold the same, except
// in `scale` and `selected`.
struct SlotPair {
  uint32_t parent[2];  // among those of all batches and kv heads
  uint32_t bits[2];    // as GradientShared::slots, and kExists
  int slot;            // slot of the first; the second is in the slot before it
  uint32_t selected;   // lane 2 i + j: the children of parent j that take no part for query i of the block
  float scale;         // lane 16 i + c: undoes the power of two of child c of parent i
  float power;         // common power of two of the task's keys
  uint32_t own_rows;   // children of the diagonal parent that the first (bits 0-7) and last (8-15) query see

  static constexpr uint32_t kExists = 1u << 18;  // takes part for some query; else it is read as zeros

  __device__ __forceinline__ bool exists(int i) const { return bits[i] & kExists; }
  __device__ __forceinline__ bool own(int i) const { return bits[i] & kOwnSlot; }
  __device__ __forceinline__ int own_first() const { return own_rows & 0xff; }
  __device__ __forceinline__ int own_last() const { return own_rows >> 8; }
};

// Walks the tiles of all tasks of this thread block, from the last slot of a list to its first.
template <typename T, typename Tile>
class PairWalk {
 public:
  using Block = PackedParent<Tile::kDim, Tile::kDim>;

  __device__ __forceinline__ PairWalk(const PerListGradientParams& params, int warp)
      : params_(params), task_idx_(params.run.first_task + blockIdx.x), warp_(warp) {
    start();
  }

  __device__ __forceinline__ bool done() const {
    return task_idx_ >= params_.run.first_task + params_.run.num_tasks;
  }

  // The warp's parents of the current tile; not after done(). No lane waits here for what it loads.
  __device__ __forceinline__ SlotPair pair() const {
    const int lane = threadIdx.x % 32;
    SlotPair pair;
    pair.slot = num_slots_ - 1 - tile_ * kGradientSlots - 2 * warp_;
    pair.own_rows = own_rows_;
    pair.selected = kWholeSlot;
    if (query_masks(params_) && selected_ && pair.slot >= lane % 2) {
      pair.selected = selected_[pair.slot - lane % 2];
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int from = tile_ % kTilesAhead * 2 + i;
      pair.parent[i] = first_parent_ + __shfl_sync(0xffffffffu, parents_, from);
      pair.bits[i] = __shfl_sync(0xffffffffu, bits_, from);
    }
    const uint32_t mine = lane < 16 ? pair.parent[0] : pair.parent[1];
    const float* scales = reinterpret_cast<const float*>(params_.gather.packed +
                                                         int64_t{mine} * Block::kBytes + Block::kScaleOffset);
    pair.scale = scales[lane % 16];
    pair.power = key_power_;
    return pair;
  }

  __device__ __forceinline__ void advance() {
    ++tile_;
    if (tile_ * kGradientSlots >= num_slots_) {
      task_idx_ += gridDim.x;
      start();
    } else if (tile_ % kTilesAhead == 0) {
      read(tile_);
    }
  }

 private:
  static constexpr int kTilesAhead = 16;  // a lane holds one parent: two of each tile

  // Finds the first task from task_idx_ on that has slots.
  __device__ __forceinline__ void start() {
    for (; !done(); task_idx_ += gridDim.x) {
      const GradientTask task = gradient_task(params_, task_idx_);
      if (task.num_slots == 0) {
        continue;
      }
      const GatherParams& p = params_.gather;
      num_slots_ = task.num_slots;
      tile_ = 0;
      diagonal_parent_ = static_cast<int>(task.diagonal_parent);
      own_rows_ = static_cast<uint32_t>(task.own_first | task.own_last << 8);
      first_parent_ = task.head_index * static_cast<uint32_t>(p.num_parents);
      key_power_ = params_.powers[task_idx_].key;
      const int64_t row = int64_t{task.list_row} * p.num_kv_heads + task.kv_head;
      list_ = p.lists ? p.lists + task.batch * p.list_batch + row * p.list_width : nullptr;
      selected_ = nullptr;
      const int query = query_masks(params_) ? task.first_pair / p.group + threadIdx.x % 32 / 2 : 0;
      if (params_.selected && query < task.num_queries) {
        const int64_t lists = (p.num_queries + params_.mask_stride - 1) / params_.mask_stride;
        const int64_t mask_row =
            (task.batch * lists + (task.first_query + query) / params_.mask_stride) * p.num_kv_heads +
            task.kv_head;
        selected_ = reinterpret_cast<const uint16_t*>(params_.selected + mask_row * params_.mask_words);
      }
      read(0);
      return;
    }
  }

  // Lane 2 i + j gets the warp's parent j of tile `first` + i, and which of its children take part.
  __device__ __forceinline__ void read(int first) {
    const int lane = threadIdx.x % 32;
    const int slot = num_slots_ - 1 - (first + lane / 2) * kGradientSlots - 2 * warp_ - lane % 2;
    parents_ = 0;
    bits_ = 0;
    if (slot < 0) {
      return;
    }
    const int parent = list_ ? list_[slot] : slot;
    if (parent < 0 || parent > diagonal_parent_) {
      return;  // a caller's list that breaks the rules: its node is absent, and nothing is read out of bounds
    }
    const bool own = parent == diagonal_parent_ || slot == num_slots_ - 1;
    uint32_t present = own ? (1u << (own_rows_ >> 8)) - 1u : kWholeSlot;
    uint32_t flags = SlotPair::kExists | (own ? kOwnSlot : 0u);
    if (query_masks(params_)) {
      flags |= kQuerySlot;
    } else if (selected_) {
      present &= ~static_cast<uint32_t>(selected_[slot]);
    }
    parents_ = parent;
    bits_ = present | flags;
  }

  const PerListGradientParams& params_;
  uint32_t task_idx_;
  int warp_;
  int num_slots_, tile_, diagonal_parent_;
  uint32_t own_rows_, first_parent_;
  float key_power_;
  const int32_t* list_;
  const uint16_t* selected_;  // masks of the task, or of the lane's query where queries have their own
  int parents_;
  uint32_t bits_;
};

template <typename T, typename Tile, bool kRotates>
class GradientProducer {
 public:
  using Block = PackedParent<Tile::kDim, Tile::kDim>;
  using Rotation = KeyRotation<Tile::kDim>;

  __device__ __forceinline__ GradientProducer(const PerListGradientParams& params,
                                              GradientShared<Tile>& shared)
      : params_(params),
        shared_(shared),
        warp_(__shfl_sync(device::kFullMask, threadIdx.x / 32, 0)),
        lane_(threadIdx.x % 32) {}

  // All lanes of a producer warp call.
  __device__ __forceinline__ void run() {
    PairWalk<T, Tile> walk(params_, warp_);
    for (unsigned tile_idx = 0; !walk.done(); ++tile_idx) {
      const SlotPair pair = walk.pair();
      load_keys(pair, tile_idx);
      load_values(pair, tile_idx);
      finish_keys(pair, tile_idx);
      walk.advance();
    }
  }

 private:
  __device__ __forceinline__ const char* block_of(const SlotPair& pair, int i) const {
    return params_.gather.packed + int64_t{pair.parent[i]} * Block::kBytes;
  }
  __device__ __forceinline__ int slot_offset(int i) const { return (2 * warp_ + i) * Tile::kSlotBytes; }
  __device__ __forceinline__ SlotRotation load_rotation(int slot) const {
    if constexpr (kRotates) {
      return Rotation::load(params_.rotations, max(slot, 0));
    } else {
      return {};
    }
  }

  __device__ __forceinline__ void load_keys(const SlotPair& pair, unsigned tile_idx) {
    const int stage = gradient_stage<Tile>(tile_idx);
    device::barrier_wait(&shared_.keys_empty[stage], gradient_phase<Tile>(tile_idx) ^ 1);
    if (lane_ == 0) {
      device::Barrier* landed = &shared_.keys_landed[stage][warp_];
      device::barrier_arrive_expect(landed, (pair.exists(0) + pair.exists(1)) * Tile::kSlotBytes);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (pair.exists(i)) {
          device::bulk_load(shared_.keys[stage] + slot_offset(i), block_of(pair, i), Tile::kSlotBytes,
                            landed);
        }
      }
    }
  }

  __device__ __forceinline__ void finish_keys(const SlotPair& pair, unsigned tile_idx) {
    const int stage = gradient_stage<Tile>(tile_idx);
    SlotRotation rotation = load_rotation(pair.slot);
    device::barrier_wait(&shared_.keys_landed[stage][warp_], gradient_phase<Tile>(tile_idx));
    // Brings the keys to the task's common power of two. It exceeds 1 for no key that takes part, but may overflow for a
    // later one, whose row is cleared.
    const float scale = fminf(pair.scale * pair.power, 1.f);
    const unsigned scaled = __ballot_sync(0xffffffffu, scale != 1.f);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      char* keys = shared_.keys[stage] + slot_offset(i);
      if (pair.exists(i)) {
        if (pair.own(i)) {
          clean_rows<__half>(keys, keys, pair);
          __syncwarp();
        }
        if (scaled >> (16 * i) & 0xffff) {
          scale_rows(keys, scale, i);
          __syncwarp();
        }
        if constexpr (kRotates) {
          Rotation::run(device::shared_address(keys), rotation);
        }
      } else {
        clear(keys);
      }
      rotation = load_rotation(pair.slot - 1);
    }
    if (lane_ == 0) {
      shared_.slots[stage][2 * warp_] = pair.bits[0];
      shared_.slots[stage][2 * warp_ + 1] = pair.bits[1];
    }
    if (pair.bits[0] & kQuerySlot) {
      shared_.query_masks[stage][2 * warp_ + lane_ % 2][lane_ / 2] = static_cast<uint16_t>(~pair.selected);
    }
    device::fence_async_shared();
    __syncwarp();
    device::barrier_arrive(&shared_.keys_full[stage]);  // every lane arrives, for what it wrote itself
  }

  __device__ __forceinline__ void load_values(const SlotPair& pair, unsigned tile_idx) {
    const int stage = gradient_stage<Tile>(tile_idx);
    device::Barrier* full = &shared_.values_full[stage];
    device::barrier_wait(&shared_.values_empty[stage], gradient_phase<Tile>(tile_idx) ^ 1);
    uint32_t bytes = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      char* values = shared_.values[stage] + slot_offset(i);
      if (!pair.exists(i)) {
        clear(values);
      } else if (pair.own(i)) {
        clean_rows<T>(block_of(pair, i) + Block::kValueOffset, values, pair);
      } else {
        bytes += Tile::kSlotBytes;
      }
    }
    if (bytes != 2 * Tile::kSlotBytes) {
      device::fence_async_shared();
      __syncwarp();
    }
    if (lane_ == 0) {
      device::barrier_arrive_expect(full, bytes);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (pair.exists(i) && !pair.own(i)) {
          device::bulk_load(shared_.values[stage] + slot_offset(i), block_of(pair, i) + Block::kValueOffset,
                            Tile::kSlotBytes, full);
        }
      }
    }
  }

  __device__ __forceinline__ void clear(char* slot) const {
#pragma unroll
    for (int at = 0; at < Tile::kSlotBytes; at += 512) {
      *reinterpret_cast<uint4*>(slot + at + lane_ * 16) = uint4{0, 0, 0, 0};
    }
  }

  // Clears the children of the diagonal parent that lie in the future of some queries: a weight of 0 does not
  // silence a NaN. Rows that no query sees become 0. In rows that only some queries see, elements that are
  // not finite become 0: for the queries that do see them, the sum of the weights or delta is not finite
  // either, so their gradients still show it.
  template <typename E>
  __device__ __forceinline__ void clean_rows(const char* from, char* to, const SlotPair& pair) const {
    constexpr uint32_t kExponent = __is_same(E, __half) ? 0x7c00u : 0x7f80u;
#pragma unroll 1
    for (int step = 0; step < Tile::kSlotBytes; step += 512) {
      const int at = step + lane_ * 16;
      const int row = row_of_offset<Tile::kDim>(at);
      uint4 pack = *reinterpret_cast<const uint4*>(from + at);
      uint32_t* words = reinterpret_cast<uint32_t*>(&pack);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (row >= pair.own_last()) {
          words[i] = 0;
        } else if (row >= pair.own_first()) {
#pragma unroll
          for (int half = 0; half < 32; half += 16) {
            if ((words[i] >> half & kExponent) == kExponent) {
              words[i] &= ~(0xffffu << half);
            }
          }
        }
      }
      *reinterpret_cast<uint4*>(to + at) = pack;
    }
  }

  // Rare: the task's keys do not share one power of two.
  __device__ __forceinline__ void scale_rows(char* keys, float scale, int i) const {
#pragma unroll 1
    for (int step = 0; step < Tile::kSlotBytes; step += 512) {
      const int at = step + lane_ * 16;
      const float power = __shfl_sync(0xffffffffu, scale, 16 * i + row_of_offset<Tile::kDim>(at));
      uint4 pack = *reinterpret_cast<const uint4*>(keys + at);
      __half2* pairs = reinterpret_cast<__half2*>(&pack);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 x = __half22float2(pairs[j]);
        pairs[j] = __floats2half2_rn(x.x * power, x.y * power);
      }
      *reinterpret_cast<uint4*>(keys + at) = pack;
    }
  }

  const PerListGradientParams& params_;
  GradientShared<Tile>& shared_;
  int warp_, lane_;
};

}  // namespace htree::tree_attention
