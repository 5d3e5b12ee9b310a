// The producer warps of attend.cuh. Warp w brings parent w of every tile into shared memory and, with positions by the list,
// rotates its keys to their place in it, R_{16 slot} K' (docs/semantics/tree_attention.md §1.4).
#pragma once

#include <type_traits>

#include "device/reduce.cuh"
#include "device/sm90/tma.cuh"
#include "ops/sparse_attention/cuda/sm90/forward/per_list/key_rotation.cuh"
#include "ops/sparse_attention/cuda/sm90/forward/per_list/task.cuh"

namespace htree::tree_attention {

// One parent on its way to shared memory, in few registers. All lanes hold the same.
struct SlotSource {
  uint32_t parent;  // among those of all batches and kv heads
  int slot;         // slot in the list
  // Bits 0-15: the children that take part for some query. Bits 16-20 and 21-25: how many of the diagonal parent's
  // children take part for the first and for the last query.
  uint32_t bits;

  static constexpr uint32_t kOwn = 1u << 26;     // it is the queries' diagonal parent
  static constexpr uint32_t kExists = 1u << 27;  // not past the end of the list
  static constexpr uint32_t kInTile = 1u << 28;  // part of a tile, even if past the end of the list

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
  // Finds the first task from task_idx_ on that has slots.
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

  // Lane i gets the warp's slot of tile `first` + i: its parent, and which children take part. Addresses are
  // computed anew each time, since registers are short.
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

  // The consumers reach the end of the task a few tiles after this; what they will read is then in the L2. A
  // warp asks for an eighth of the rows.
  __device__ __forceinline__ void prefetch_state(const ListTask& task) const {
    const GatherParams& p = params_.gather;
    constexpr int kLines = Tile::kValueDim / 32;  // 128-byte lines of a row
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

template <typename Tile, bool kRotates>
class PerListProducer {
 public:
  using Block = PackedParent<Tile::kKeyDim, Tile::kValueDim>;
  using Rotation = KeyRotation<Tile::kKeyDim>;

  __device__ __forceinline__ PerListProducer(const AttendParams& params, PerListShared<Tile>& shared)
      : params_(params),
        shared_(shared),
        // Taken from one lane, so that the compiler knows it to be the same in all lanes.
        warp_(__shfl_sync(device::kFullMask, static_cast<int>(threadIdx.x / 32), 0)),
        lane_(threadIdx.x % 32) {}

  // All lanes of a producer warp call. `T` is the type of the values.
  template <typename T>
  __device__ __forceinline__ void run() {
    SlotWalk<Tile> walk(params_, warp_);
    constexpr int kAhead = Tile::kStages - 1;
    SlotSource ahead[kAhead + 1];
    const auto load_next = [&](int place, unsigned tile_idx) {
      ahead[place].bits = 0;
      if (!walk.done()) {
        ahead[place] = walk.next();
        load_keys(ahead[place], tile_idx);
      }
    };
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      load_next(i, i);
    }
    if (!ahead[0].in_tile()) {
      return;
    }
    // These come from memory and are asked for one tile ahead. Further ahead would not help: handing such a
    // value from variable to variable waits for it.
    SlotRotation rotation = load_rotation(ahead[0]);
    float scale = load_scale(ahead[0]);
    for (unsigned tile_idx = 0; ahead[0].in_tile(); ++tile_idx) {
      rotate_keys(ahead[0], rotation, scale, tile_idx);
      if (ahead[1].in_tile()) {
        rotation = load_rotation(ahead[1]);
        scale = load_scale(ahead[1]);
      }
      load_values<T>(ahead[0], tile_idx);
      load_next(kAhead, tile_idx + kAhead);
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        ahead[i] = ahead[i + 1];
      }
    }
  }

 private:
  __device__ __forceinline__ const char* block_of(const SlotSource& source) const {
    return params_.gather.packed + int64_t{source.parent} * Block::kBytes;
  }

  __device__ __forceinline__ SlotRotation load_rotation(const SlotSource& source) const {
    if constexpr (kRotates) {
      return Rotation::load(params_.rotations, source.slot);
    } else {
      return {};
    }
  }

  // Lane c < 16 gets what undoes the power of two of child c, other lanes get 1.
  __device__ __forceinline__ float load_scale(const SlotSource& source) const {
    const bool wanted = source.exists() && lane_ < kParentRows;
    return wanted ? reinterpret_cast<const float*>(block_of(source) + Block::kScaleOffset)[lane_] : 1.f;
  }

  __device__ __forceinline__ void load_keys(const SlotSource& source, unsigned tile_idx) {
    const int stage = stage_of<Tile>(tile_idx);
    device::barrier_wait(&shared_.keys_empty[stage], phase_of<Tile>(tile_idx) ^ 1);
    if (source.exists() && lane_ == 0) {
      device::Barrier* landed = &shared_.keys_landed[stage][warp_];
      device::barrier_arrive_expect(landed, Tile::kSlotKeyBytes);
      device::bulk_load(shared_.keys[stage] + warp_ * Tile::kSlotKeyBytes, block_of(source),
                        Tile::kSlotKeyBytes, landed);
    } else if (lane_ == 0) {
      device::barrier_arrive(&shared_.keys_landed[stage][warp_]);
    }
  }

  __device__ __forceinline__ void rotate_keys(const SlotSource& source, const SlotRotation& rotation,
                                              float scale, unsigned tile_idx) {
    const int stage = stage_of<Tile>(tile_idx);
    TileNote& note = shared_.notes[tile_idx % Tile::kNotes];
    const bool scaled = __any_sync(device::kFullMask, scale != 1.f);
    if (scaled && lane_ < kParentRows) {
      note.exponents[warp_ * kParentRows + lane_] = static_cast<uint8_t>(__float_as_uint(scale) >> 23);
    }
    if (lane_ == 0) {
      note.slots[warp_] = (source.bits & TileNote::kAll) | (scaled ? TileNote::kScaled : 0);
    }
    device::barrier_wait(&shared_.keys_landed[stage][warp_], phase_of<Tile>(tile_idx));
    if (kRotates && source.exists()) {
      Rotation::run(device::shared_address(shared_.keys[stage]) + warp_ * Tile::kSlotKeyBytes, rotation);
      device::fence_async_shared();
    }
    __syncwarp();
    if (lane_ == 0) {
      device::barrier_arrive(&shared_.keys_full[stage]);
    }
  }

  template <typename T>
  __device__ __forceinline__ void load_values(const SlotSource& source, unsigned tile_idx) {
    const int stage = stage_of<Tile>(tile_idx);
    device::Barrier* full = &shared_.values_full[stage];
    char* values = shared_.values[stage] + warp_ * Tile::kSlotValueBytes;
    device::barrier_wait(&shared_.values_empty[stage], phase_of<Tile>(tile_idx) ^ 1);
    if (source.exists() && !source.own()) {
      if (lane_ == 0) {
        device::barrier_arrive_expect(full, Tile::kSlotValueBytes);
        device::bulk_load(values, block_of(source) + Block::kValueOffset, Tile::kSlotValueBytes, full);
      }
      return;
    }
    bool nonfinite = false;
    if (source.exists()) {
      nonfinite = copy_own_values<T>(source, device::shared_address(values));
    } else {
      // Weights of 0 meet these values, and 0 times a NaN that was left here would be NaN.
#pragma unroll
      for (int at = 0; at < Tile::kSlotValueBytes; at += 512) {
        device::store_shared_16(device::shared_address(values) + at + lane_ * 16, uint4{0, 0, 0, 0});
      }
    }
    device::fence_async_shared();
    __syncwarp();
    if (lane_ == 0) {
      if (source.own()) {
        shared_.notes[tile_idx % Tile::kNotes].nonfinite = nonfinite;
      }
      device::barrier_arrive(full);
    }
  }

  // Copies the values of the diagonal parent, some of whose children lie in the future of some queries: a weight
  // of 0 does not silence a NaN there. Rows that no query sees become 0. In rows that only some queries see,
  // elements that are not finite become 0; returns whether there were such elements.
  template <typename T>
  __device__ __forceinline__ bool copy_own_values(const SlotSource& source, uint32_t values) const {
    constexpr uint32_t kExponent = std::is_same_v<T, __half> ? 0x7c00u : 0x7f80u;
    const int first = source.own_first(), last = source.own_last();
    const char* from = block_of(source) + Block::kValueOffset;
    bool found = false;
#pragma unroll 1
    for (int step = 0; step < Tile::kSlotValueBytes; step += 512) {
      const int at = step + lane_ * 16;
      const int row = row_of_offset<Tile::kValueDim>(at);
      uint4 pack = *reinterpret_cast<const uint4*>(from + at);
      uint32_t* words = reinterpret_cast<uint32_t*>(&pack);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (row >= last) {
          words[i] = 0;
        } else if (row >= first) {
#pragma unroll
          for (int half = 0; half < 32; half += 16) {
            if ((words[i] >> half & kExponent) == kExponent) {
              words[i] &= ~(0xffffu << half);
              found = true;
            }
          }
        }
      }
      device::store_shared_16(values + at, pack);
    }
    return __any_sync(device::kFullMask, found);
  }

  const AttendParams& params_;
  PerListShared<Tile>& shared_;
  int warp_, lane_;
};

}  // namespace htree::tree_attention
