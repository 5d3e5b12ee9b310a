// The producer warps of block_attend.cuh: warp w brings parent w of every tile into shared memory and turns
// its keys to their place in the list, R_{16 slot} K' (docs/semantics.md §1.4).
//
// Keys are turned in fp16, two at a time: three roundings of 2^-11 each are still better than one to bf16.
#pragma once

#include "device/tma.cuh"
#include "ops/tree_attention/attention/block/block_task.cuh"

namespace htree::tree_attention {

// One parent on its way, in few registers; all lanes hold the same but `scale`.
struct SlotSource {
  uint32_t parent;  // among those of all batches and kv heads
  int slot;         // place in the list
  // Bits 0-15: children that take part for some query; 16-20 and 21-25: how many of the own parent's take part
  // for the first and for the last query.
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
    const uint32_t id = __shfl_sync(0xffffffffu, ids_, tile_ % 32);
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
#if STUDY_VOLATILE
      asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(source.scale) : "l"(params_.gather.blocks + int64_t{source.parent} * Block::kBytes + Block::kScaleOffset + lane % 16 * 4));
      if (false)
#endif
      if (lane < kBlockRows) {
        source.scale = reinterpret_cast<const float*>(params_.gather.blocks +
                                                      int64_t{source.parent} * Block::kBytes +
                                                      Block::kScaleOffset)[lane];
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

// cos and sin of the 8 pairs of dims that a lane turns.
struct SlotTurn {
  uint4 cos, sin;
};

// Turns the 16 key rows at `keys` in place: lane i takes 16-byte chunk i % (K / 16) of the lower half and its
// partner in the upper half, in an order free of bank conflicts.
template <int kKeyDim>
struct KeyTurner {
  static constexpr int kChunks = kKeyDim / 16;  // of the lower half of a row
  static constexpr int kPasses = kBlockRows * kChunks / 32;

  // Address of the partner of a lower chunk.
  __device__ __forceinline__ static uint32_t partner(uint32_t address) {
    return kKeyDim == 128 ? address + 1024 : address ^ static_cast<uint32_t>(kKeyDim);
  }

  __device__ __forceinline__ static int chunk() { return threadIdx.x % kChunks; }
  // Eight lanes side by side must cover 128 bytes of banks.
  __device__ __forceinline__ static int row(int pass) {
    const int at = threadIdx.x % 32 / kChunks;
    if (kKeyDim == 128) {
      return at + 4 * pass;
    }
    if (kKeyDim == 64) {
      return (at & 1) * 4 + (at >> 1) + 8 * pass;
    }
    return (at & 1) + (at & 2) * 2 + (at & 4) / 2 + (at & 8);
  }

  __device__ __forceinline__ static SlotTurn load(const uint16_t* turns, int slot) {
    const uint4* from = reinterpret_cast<const uint4*>(turns + static_cast<int64_t>(slot) * kKeyDim) + chunk();
#if STUDY_VOLATILE
    SlotTurn t;
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(t.cos.x), "=r"(t.cos.y), "=r"(t.cos.z), "=r"(t.cos.w) : "l"(from));
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(t.sin.x), "=r"(t.sin.y), "=r"(t.sin.z), "=r"(t.sin.w) : "l"(from + kChunks));
    return t;
#endif
    return {__ldg(from), __ldg(from + kChunks)};
  }

  __device__ __forceinline__ static void turn_chunk(uint4& low, uint4& high, const SlotTurn& turn) {
    __half2* x = reinterpret_cast<__half2*>(&low);
    __half2* y = reinterpret_cast<__half2*>(&high);
    const __half2* c = reinterpret_cast<const __half2*>(&turn.cos);
    const __half2* s = reinterpret_cast<const __half2*>(&turn.sin);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const __half2 rotated = __hfma2(x[i], c[i], __hneg2(__hmul2(y[i], s[i])));
      y[i] = __hfma2(y[i], c[i], __hmul2(x[i], s[i]));
      x[i] = rotated;
    }
  }

  __device__ __forceinline__ static void run(uint32_t keys, const SlotTurn& turn) {
    constexpr int kBatch = kPasses < 2 ? kPasses : 2;  // chunks in registers at a time
#pragma unroll
    for (int first = 0; first < kPasses; first += kBatch) {
      uint4 low[kBatch], high[kBatch];
      uint32_t at[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        at[i] = keys + chunk_offset<kKeyDim>(row(first + i), chunk());
        low[i] = device::load_shared_16(at[i]);
        high[i] = device::load_shared_16(partner(at[i]));
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        turn_chunk(low[i], high[i], turn);
        device::store_shared_16(at[i], low[i]);
        device::store_shared_16(partner(at[i]), high[i]);
      }
    }
  }
};

template <typename Tile>
class BlockProducer {
 public:
  using Block = ParentBlock<Tile::kKeyDim, Tile::kValueDim>;
  using Turner = KeyTurner<Tile::kKeyDim>;

  __device__ __forceinline__ BlockProducer(const AttendParams& params, BlockShared<Tile>& shared)
      : params_(params), shared_(shared), warp_(threadIdx.x / 32), lane_(threadIdx.x % 32) {}

  // All lanes of a producer warp. `T` is the type of the values.
  template <typename T>
  __device__ __forceinline__ void run() {
    SlotWalk<Tile> walk(params_, warp_);
    constexpr int kAhead = Tile::kStages - 1;
    SlotSource ahead[kAhead + 1];
    bool some[kAhead + 1];
    unsigned loaded = 0;
    const auto load_next = [&](int place) {
      some[place] = !walk.done();
      if (some[place]) {
        ahead[place] = walk.next();
        load_keys(ahead[place], loaded++);
      }
    };
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      load_next(i);
    }
    if (!some[0]) {
      return;
    }
    SlotTurn turn = Turner::load(params_.gather.slot_turns, ahead[0].slot);
    for (unsigned tile_idx = 0;; ++tile_idx) {
      turn_keys(ahead[0], turn, tile_idx);
      turn = Turner::load(params_.gather.slot_turns, some[1] ? ahead[1].slot : 0);
      load_values<T>(ahead[0], tile_idx);
      load_next(kAhead);
      if (!some[1]) {
        return;
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        ahead[i] = ahead[i + 1];
        some[i] = some[i + 1];
      }
    }
  }

 private:
  __device__ __forceinline__ const char* block_of(const SlotSource& source) const {
    return params_.gather.blocks + int64_t{source.parent} * Block::kBytes;
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

  __device__ __forceinline__ void turn_keys(const SlotSource& source, const SlotTurn& turn,
                                            unsigned tile_idx) {
    const int stage = stage_of<Tile>(tile_idx);
    TileNote& note = shared_.notes[tile_idx % Tile::kNotes];
    const bool scaled = __any_sync(0xffffffffu, source.scale != 1.f);
    if (scaled && lane_ < kBlockRows) {
      note.exponents[warp_ * kBlockRows + lane_] = static_cast<uint8_t>(__float_as_uint(source.scale) >> 23);
    }
    if (lane_ == 0) {
      note.slots[warp_] = (source.bits & TileNote::kAll) | (scaled ? TileNote::kScaled : 0);
    }
    device::barrier_wait(&shared_.keys_landed[stage][warp_], phase_of<Tile>(tile_idx));
    if (source.exists()) {
      Turner::run(device::shared_address(shared_.keys[stage]) + warp_ * Tile::kSlotKeyBytes, turn);
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
      // weights of 0 meet these values, and 0 times what was left here could be NaN
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

  // The own parent has children in the future of some queries: 0 times a NaN there would not be silent. Rows
  // that no query sees become 0, as do elements that are not finite in rows that some see; true if there
  // were such.
  template <typename T>
  __device__ __forceinline__ bool copy_own_values(const SlotSource& source, uint32_t values) const {
    constexpr uint32_t kExponent = sizeof(T) == 2 && __is_same(T, __half) ? 0x7c00u : 0x7f80u;
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
    return __any_sync(0xffffffffu, found);
  }

  const AttendParams& params_;
  BlockShared<Tile>& shared_;
  int warp_, lane_;
};

}  // namespace htree::tree_attention
