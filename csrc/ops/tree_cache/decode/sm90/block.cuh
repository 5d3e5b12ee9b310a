// What a block of the decode kernel knows: its row, its shares of each layer, and its shared memory.
#pragma once

#include "device/divmod.cuh"
#include "device/mma.cuh"
#include "device/select.cuh"
#include "device/sm90/mbarrier.cuh"
#include "ops/tree_cache/decode/decode_plan.h"
#include "ops/tree_cache/rows.cuh"

namespace htree::tree_cache {

// A head dim, the query heads of a K/V head in tiles of eight, whether span means choose, the warps of a block, and the
// bits of a channel of the tokens where they are packed; 0: tokens are rows of T.
template <typename T_, int kDim_, int kHeadTiles_, bool kSpans_, int kWarps_, int kLeafBits_ = 0>
struct DecodeTraits {
  using T = T_;
  static constexpr int kLeafBits = kLeafBits_;
  static constexpr bool kSpans = kSpans_;
  static constexpr int kWarps = kWarps_;
  static constexpr int kThreads = 32 * kWarps;
  static constexpr int kDim = kDim_;
  static constexpr int kHalf = kDim / 2;  // dim i is rotated with dim i + kHalf
  static constexpr int kHeadTiles = kHeadTiles_;
  static constexpr int kHeads = 8 * kHeadTiles;
  static constexpr int kChunks = kDim / 8;  // 16 bytes of a row each
  static constexpr int kSteps = kDim / 64;  // packs of eight that a lane has in each half of a row
  static constexpr int kRowBytes = kDim * 2;
  static constexpr int kTileBytes = kDecodeRate * kRowBytes;
  static constexpr int kStageBytes = kTileBytes + kHalf * 8;
  static constexpr int kMergeStride = kDim + 4;
  // Of a packed token, and where the scales stand in a tile of them: behind all codes.
  static constexpr int kCodeBytes = kDim * kLeafBits / 8;
  static constexpr int kScalesAt = kDecodeRate * kCodeBytes;
};

// A softmax that is not finished: out is relative to max, which is in units of log2.
template <class Tr>
struct DecodeState {
  float max[Tr::kHeads];
  float sum[Tr::kHeads];
  float out[Tr::kHeads][Tr::kDim];
};

// Maximum in units of log2, and the sum of the powers relative to it.
struct LogSum {
  float max;
  float sum;
};

// The smallest and the largest of some keys of importances (below 2^31), and the number of other keys.
struct alignas(16) KeyRange {
  uint32_t least;
  uint32_t most;
  uint32_t upper;
  uint32_t unused;

  __device__ __forceinline__ void add(uint32_t key) {
    const bool lower = key >> 31 == 0;
    least = min(least, key);
    most = max(most, lower ? key : 0);
    upper += lower ? 0 : 1;
  }
  __device__ __forceinline__ void add(const KeyRange& other) {
    least = min(least, other.least);
    most = max(most, other.most);
    upper += other.upper;
  }
  // Those of all lanes.
  __device__ __forceinline__ void reduce_warp() {
    least = __reduce_min_sync(device::kFullMask, least);
    most = __reduce_max_sync(device::kFullMask, most);
    upper = __reduce_add_sync(device::kFullMask, upper);
  }
};
__device__ __forceinline__ KeyRange no_keys() {
  return {~0u, 0, 0, 0};
}

struct DecodeShared {
  device::Barrier sums_arrived;  // log sums of all shares of the cluster
  device::Barrier keys_arrived;  // keys of the other blocks, and their ranges
  alignas(16) LogSum shares[kShares][16];
  LogSum warps[2][kDecodeMostWarps][16];  // of two shares by turns; of values the first alone
  float normalizer[16];
  KeyRange warp_ranges[kDecodeMostWarps];
  KeyRange ranges[kShares];  // of the blocks of the cluster
  device::RadixScratch radix;
  uint32_t num_undecided;
  // While the values of a share are added: the maximum of each head, and where the sums of each warp are.
  float maxima[16];
  const float* parts[kDecodeMostWarps];
};

// A launch for other rows of the chunk, which runs beside this one. The second begins once all blocks of the first have
// begun, and reads global memory without a wait: the first is launched without PDL, so what came before it has completed,
// and neither reads or writes what the other writes. The second ends after the first, so that what comes next in the
// stream waits for both.
enum class OtherRows : uint8_t { kNone, kFollow, kPrecede };

template <typename T>
struct DecodeParams {
  AttendParams<T> attend;
  DecodePlan plan;
  int64_t first = 0;              // of the launch, among the rows times K/V heads of the chunk
  device::FastDivisor key_rows;   // of a page and head
  device::FastDivisor page_size;  // tokens
  // With a stride, leaders come first, in a launch of their own: other rows read their lists. Where lists are given, no row
  // leads.
  bool leaders = true;
  OtherRows others = OtherRows::kNone;
};

// One row, as a block of its cluster sees it.
template <class Tr>
struct DecodeBlock {
  using T = typename Tr::T;

  const DecodeParams<T>& params;
  DecodeShared& shared;
  uint8_t* dynamic;
  WalkRow walk;
  bool leads;
  int rank;  // of the block in its cluster
  int warp;
  int lane;

  __device__ __forceinline__ const AttendParams<T>& attend() const { return params.attend; }
  __device__ __forceinline__ int top_k() const { return params.attend.options.top_k; }
  __device__ __forceinline__ int most_slots() const { return params.attend.options.parents; }
  __device__ __forceinline__ float* scores() const {
    return reinterpret_cast<float*>(dynamic + params.plan.places.scores);
  }
  __device__ __forceinline__ float* span_scores() const {
    return reinterpret_cast<float*>(dynamic + params.plan.places.span_scores);
  }
  __device__ __forceinline__ uint32_t* keys() const {
    return reinterpret_cast<uint32_t*>(dynamic + params.plan.places.keys);
  }
  __device__ __forceinline__ int32_t* list(int which) const {
    return reinterpret_cast<int32_t*>(dynamic + params.plan.places.lists) + which * most_slots();
  }
  __device__ __forceinline__ uint32_t* rows(int which) const {
    const int slots = params.plan.shares * ((most_slots() + kShares - 1) / kShares);
    return reinterpret_cast<uint32_t*>(dynamic + params.plan.places.rows) + which * slots * kDecodeRate;
  }
  __device__ __forceinline__ uint32_t* selected() const {
    return reinterpret_cast<uint32_t*>(dynamic + params.plan.places.selected);
  }
  __device__ __forceinline__ DecodeState<Tr>* states() const {
    return reinterpret_cast<DecodeState<Tr>*>(dynamic + params.plan.places.states);
  }
  __device__ __forceinline__ uint32_t* queries() const {
    return reinterpret_cast<uint32_t*>(dynamic + params.plan.places.queries);
  }
  __device__ __forceinline__ float* children(int child) const {
    return reinterpret_cast<float*>(dynamic + params.plan.places.children) + child * child_stride(Tr::kDim);
  }
  __device__ __forceinline__ uint8_t* ring() const {
    return dynamic + params.plan.places.ring + warp * params.plan.stages * Tr::kStageBytes;
  }
};

// The slots of a row's list in one layer, and those of this block and warp among them.
struct LayerSlots {
  int layer = -1;   // -1: no layer
  int num = 0;      // candidates
  int slots = 0;    // of the list
  int share = 0;    // slots of a share, but for the last ones
  int first = 0;    // slot of this block
  int tiles = 0;    // slots of this warp in a share; the last of them may not exist
  int inverse = 0;  // of `tiles`, times 2^16 and rounded up: a tile's share by one product

  // The number of slots of this block.
  __device__ __forceinline__ int own(int shares) const { return max(0, min(slots - first, shares * share)); }
};

// Whether the rows of a layer are packed tokens.
template <class Tr>
__device__ __forceinline__ bool has_codes(const LayerSlots& slots) {
  return Tr::kLeafBits > 0 && slots.layer == 0;
}

// The node of a layer that holds a token: r is 16.
__device__ __forceinline__ uint32_t node_at(int32_t token, int layer) {
  return static_cast<uint32_t>(token) >> (kDecodeRateLog2 * layer);
}

template <class Tr>
__device__ __forceinline__ LayerSlots layer_slots(const DecodeBlock<Tr>& block, int layer, int num) {
  LayerSlots found;
  found.layer = layer;
  found.num = num;
  found.slots = (found.num + kDecodeRate - 1) / kDecodeRate;
  found.share = (found.slots + kShares - 1) / kShares;
  found.first = block.rank * block.params.plan.shares * found.share;
  found.tiles = found.share > block.warp ? (found.share - block.warp + Tr::kWarps - 1) / Tr::kWarps : 0;
  found.inverse = found.tiles > 0 ? (0xffff + found.tiles) / found.tiles : 0;
  return found;
}

// num_candidates() layer by layer: of the row's top, and of the layer below.
template <class Tr>
__device__ __forceinline__ LayerSlots top_slots(const DecodeBlock<Tr>& block) {
  const QueryRow& query = block.walk.query;
  return layer_slots(block, query.top, static_cast<int>(node_at(query.token, query.top)) + 1);
}
template <class Tr>
__device__ __forceinline__ LayerSlots slots_below(const DecodeBlock<Tr>& block, const LayerSlots& slots) {
  const int layer = slots.layer - 1;
  const auto last = static_cast<int>(node_at(block.walk.query.token, layer) % kDecodeRate);
  return layer_slots(block, layer, (min(slots.num, block.top_k()) - 1) * kDecodeRate + last + 1);
}

// The slot of the warp's tile `index`, counted from the block's first slot; -1 where it does not exist.
template <class Tr>
__device__ __forceinline__ int slot_of_tile(const DecodeBlock<Tr>& block, const LayerSlots& slots,
                                            int index) {
  // Exact, because `tiles` is far below 2^8.
  const int share = index * slots.inverse >> 16;
  const int in_share = block.warp + (index - share * slots.tiles) * Tr::kWarps;
  const int slot = share * slots.share + in_share;
  return slots.first + slot < slots.slots ? slot : -1;
}

}  // namespace htree::tree_cache
