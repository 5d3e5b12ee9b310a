// The producer warps of per_list_attend.cuh: warp w brings parent w of every tile into shared memory and rotates
// its keys to their place in the list, R_{16 slot} K' (docs/semantics/tree_attention.md §1.4).
#pragma once

#include <type_traits>

#include "device/hopper/tma.cuh"
#include "ops/tree_attention/cuda/forward/per_list/key_rotation.cuh"
#include "ops/tree_attention/cuda/forward/per_list/per_list_walk.cuh"

namespace htree::tree_attention {

template <typename Tile>
class PerListProducer {
 public:
  using Block = PackedParent<Tile::kKeyDim, Tile::kValueDim>;
  using Rotation = KeyRotation<Tile::kKeyDim>;

  __device__ __forceinline__ PerListProducer(const AttendParams& params, PerListShared<Tile>& shared)
      : params_(params),
        shared_(shared),
        // from one lane, so that the compiler knows it to be the same in all
        warp_(__shfl_sync(device::kFullMask, static_cast<int>(threadIdx.x / 32), 0)),
        lane_(threadIdx.x % 32) {}

  // All lanes of a producer warp. `T` is the type of the values.
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
    // These come from memory and are asked for a tile ahead; not further, since handing a value on waits for
    // it.
    SlotRotation rotation = Rotation::load(params_.rotations, ahead[0].slot);
    float scale = load_scale(ahead[0]);
    for (unsigned tile_idx = 0; ahead[0].in_tile(); ++tile_idx) {
      rotate_keys(ahead[0], rotation, scale, tile_idx);
      if (ahead[1].in_tile()) {
        rotation = Rotation::load(params_.rotations, ahead[1].slot);
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

  // Lane c < 16: what undoes the power of two of child c; else 1.
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
    if (source.exists()) {
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
