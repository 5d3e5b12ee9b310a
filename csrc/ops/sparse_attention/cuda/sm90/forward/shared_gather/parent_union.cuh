// The sorted union of the parent lists of a block's queries, built for one window of parents after another,
// and the ring of shared memory through which every parent of the union passes once.
#pragma once

#include "device/reduce.cuh"
#include "device/sizes.h"
#include "device/sm90/mbarrier.cuh"
#include "device/sm90/tma.cuh"
#include "ops/tree/cuda/sm80/gather.cuh"
#include "ops/tree/cuda/sm80/packed_layer.cuh"

namespace htree::tree_attention {

// Parents in a window, for a block of kWarps queries.
template <int kWarps>
constexpr int kUnionWindow = kWarps % 3 == 0 ? 3072 : 4096;
constexpr int kUnionTile = 4;  // parents that share a barrier of the ring

// Which queries of the block hold which parent of the window. Each of the kWarps warps has one query.
template <int kWarps>
struct UnionWindow {
  static constexpr int kParents = kUnionWindow<kWarps>;
  static_assert(kWarps <= 16 && kParents % (kWarps * 32 * 8) == 0);
  uint16_t holders[kParents];  // bit w: the query of warp w holds the parent
  uint32_t entries[kParents];  // the union, ascending: parent - base above, its holders below
  int counts[kWarps];
};

// The list of a warp, read once from beginning to end.
class ListCursor {
 public:
  __device__ __forceinline__ ListCursor(const int32_t* list, int num_slots, int64_t num_parents)
      : list_(list), num_slots_(num_slots), last_parent_(static_cast<int>(num_parents - 1)) {}

  // Marks the list's parents in base ... base + kParents - 1. The whole warp calls.
  template <int kParents>
  __device__ __forceinline__ void mark(uint16_t (&holders)[kParents], int base, int warp) {
    constexpr int kAhead = 4;
    const int lane = threadIdx.x % 32;
    unsigned inside = 32;
    while (inside == 32 && next_ < num_slots_) {
      int id[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int at = next_ + 32 * i + lane;
        id[i] = at >= num_slots_ ? base + kParents : list_ ? min(list_[at], last_parent_) : at;
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const bool marks = id[i] < base + kParents;
        const int offset = id[i] - base;
        if (marks && offset >= 0) {
          atomicOr(reinterpret_cast<uint32_t*>(&holders[0]) + offset / 2, 1u << (warp + offset % 2 * 16));
        }
        inside = __popc(__ballot_sync(device::kFullMask, marks));
        next_ += inside;
        if (inside != 32) {
          break;
        }
      }
    }
  }

 private:
  const int32_t* list_;
  int num_slots_;
  int last_parent_;
  int next_ = 0;
};

// Builds window.entries for the parents from `base` on and returns their number. All kWarps warps and the
// producer warp call.
template <int kWarps>
__device__ __forceinline__ int build_union(UnionWindow<kWarps>& window, ListCursor& cursor, int base) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  constexpr int kThreads = kWarps * 32;
  constexpr int kPerThread = kUnionWindow<kWarps> / kThreads;
  uint4* words = reinterpret_cast<uint4*>(window.holders);
  __syncthreads();  // no warp reads the previous window any more
  if (warp < kWarps) {
    for (int i = threadIdx.x; i < kUnionWindow<kWarps> / 8; i += kThreads) {
      words[i] = make_uint4(0, 0, 0, 0);
    }
  }
  __syncthreads();
  if (warp < kWarps) {
    cursor.mark(window.holders, base, warp);
  }
  __syncthreads();
  alignas(16) uint16_t mine[kPerThread];
  int count = 0, before = 0;
  if (warp < kWarps) {
#pragma unroll
    for (int i = 0; i < kPerThread / 8; ++i) {
      reinterpret_cast<uint4*>(mine)[i] = words[threadIdx.x * (kPerThread / 8) + i];
    }
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      count += mine[i] != 0;
    }
    before = count;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const int other = __shfl_up_sync(device::kFullMask, before, offset);
      before += lane >= offset ? other : 0;
    }
    if (lane == 31) {
      window.counts[warp] = before;
    }
    before -= count;
  }
  __syncthreads();
  int total = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) {
    before += i < warp ? window.counts[i] : 0;
    total += window.counts[i];
  }
  if (warp < kWarps) {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      if (mine[i] != 0) {
        window.entries[before++] = static_cast<uint32_t>(threadIdx.x * kPerThread + i) << 16 | mine[i];
      }
    }
  }
  __syncthreads();
  return total;
}

// kStages tiles of kUnionTile packed parents each. `full`: a tile has landed; `empty`: every warp has
// finished with it.
template <int kParentBytes, int kStages>
struct UnionRing {
  static constexpr int kTileBytes = kUnionTile * kParentBytes;
  device::Barrier full[kStages];
  device::Barrier empty[kStages];

  __device__ __forceinline__ void init(int num_warps) {
    for (int i = 0; i < kStages; ++i) {
      device::barrier_init(&full[i], 1);
      device::barrier_init(&empty[i], num_warps);
    }
    device::fence_barrier_init();
  }
};

// The producer warp copies the window's union into the ring.
template <int kParentBytes, int kStages>
__device__ __forceinline__ void load_union(UnionRing<kParentBytes, kStages>& ring, char* tiles,
                                           device::RingPlace<kStages>& place, const uint32_t* entries,
                                           int total, const char* packed) {
  const int lane = threadIdx.x % 32;
  for (int first = 0; first < total; first += kUnionTile) {
    const int count = min(kUnionTile, total - first);
    device::barrier_wait(&ring.empty[place.stage], place.parity ^ 1);
    if (lane == 0) {
      device::barrier_arrive_expect(&ring.full[place.stage], count * kParentBytes);
    }
    __syncwarp();
    if (lane < count) {
      device::bulk_load(
          tiles + place.stage * UnionRing<kParentBytes, kStages>::kTileBytes + lane * kParentBytes,
          packed + static_cast<int64_t>(entries[first + lane] >> 16) * kParentBytes, kParentBytes,
          &ring.full[place.stage]);
    }
    place.advance();
  }
}

// The shared memory of a block of kWarps queries. The ring has as many stages as fit.
template <typename Block, int kWarps>
struct UnionShared {
  static constexpr int kTileBytes = kUnionTile * Block::kBytes;
  static constexpr int kFit =
      (device::kHopperSharedBytes - static_cast<int>(sizeof(UnionWindow<kWarps>)) - 256) / kTileBytes;
  static constexpr int kStages = kFit < 8 ? kFit : 8;
  static_assert(kStages >= 3);
  UnionWindow<kWarps> window;
  UnionRing<Block::kBytes, kStages> ring;
  alignas(128) char tiles[kStages * kTileBytes];
};

// What the producer warpgroup does: it takes part in every window, and its first warp fills the ring.
template <typename Block, int kWarps>
__device__ __forceinline__ void load_unions(UnionShared<Block, kWarps>& shared, int num_parents,
                                            const char* packed, int warp) {
  device::RingPlace<UnionShared<Block, kWarps>::kStages> place;
  ListCursor none(nullptr, 0, 0);
  for (int base = 0; base < num_parents; base += kUnionWindow<kWarps>) {
    const int total = build_union(shared.window, none, base);
    if (warp == kWarps) {
      load_union(shared.ring, shared.tiles, place, shared.window.entries, total,
                 packed + int64_t{base} * Block::kBytes);
    }
  }
}

// What the warp of a query does: take(block, parent) for every parent of its list, in ascending order.
// `block` is the packed parent's address in shared memory.
template <typename Block, int kWarps, typename Take>
__device__ __forceinline__ void walk_unions(UnionShared<Block, kWarps>& shared, ListCursor cursor,
                                            int num_parents, int warp, Take take) {
  using Shared = UnionShared<Block, kWarps>;
  static_assert(32 % kUnionTile == 0);
  const int lane = threadIdx.x % 32;
  device::RingPlace<Shared::kStages> place;
  for (int base = 0; base < num_parents; base += kUnionWindow<kWarps>) {
    const int total = build_union(shared.window, cursor, base);
    unsigned held = 0;
    for (int first = 0; first < total; first += kUnionTile) {
      if (first % 32 == 0) {
        held = __ballot_sync(device::kFullMask,
                             first + lane < total && shared.window.entries[first + lane] >> warp & 1);
      }
      const uint32_t tile = device::shared_address(shared.tiles) + place.stage * Shared::kTileBytes;
      device::barrier_wait(&shared.ring.full[place.stage], place.parity);
      for (unsigned mine = held & ((1u << kUnionTile) - 1); mine; mine &= mine - 1) {
        const int i = __ffs(mine) - 1;
        take(tile + i * Block::kBytes, base + static_cast<int>(shared.window.entries[first + i] >> 16));
      }
      held >>= kUnionTile;
      __syncwarp();
      if (lane == 0) {
        device::barrier_arrive(&shared.ring.empty[place.stage]);
      }
      place.advance();
    }
  }
}

}  // namespace htree::tree_attention
