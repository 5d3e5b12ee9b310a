// What a block of the decode kernel knows: its row, its shares of each layer, and its shared memory.
#pragma once

#include "device/divmod.cuh"
#include "device/hopper/mbarrier.cuh"
#include "device/mma.cuh"
#include "device/select.cuh"
#include "ops/tree_cache/decode/decode_plan.h"
#include "ops/tree_cache/packed/packed_params.h"
#include "ops/tree_cache/rows.cuh"

namespace htree::tree_cache {

// ---- the largest of the keys of a layer, which all stand in shared memory: marked, and listed. Keys are counted in digits
// of the range that is left until a digit with few keys holds the last that are marked; these are ranked one by one.

// Keys from 2^31 on are not the bits of a float that is >= 0, and `upper` is their number. The others are in
// [least, most]. A message between blocks has 16 bytes.
struct alignas(16) KeyRange {
  uint32_t least = ~0u;
  uint32_t most = 0;
  uint32_t upper = 0;
  uint32_t unused = 0;

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
  // The range of all lanes together, in every lane.
  __device__ __forceinline__ KeyRange over_warp() const {
    return {__reduce_min_sync(device::kFullMask, least), __reduce_max_sync(device::kFullMask, most),
            __reduce_add_sync(device::kFullMask, upper), 0};
  }
};

constexpr int kMostRanked = 128;  // keys that are ranked one by one

struct MarkScratch {
  alignas(16) uint64_t ranked[kMostRanked + 2];  // key, and below it the complement of its position
  alignas(8) uint32_t histogram[device::kRadixDigits];
  uint32_t warp_sums[32];
  uint32_t digit;
  uint32_t remaining;
  uint32_t in_digit;
  uint32_t num_ranked;
};

// Keys in [first, last], of which `remaining` are marked, beside all larger ones. `num` is how many there are, where it
// is known.
struct KeyInterval {
  uint32_t first;
  uint32_t last;
  uint32_t remaining;
  uint32_t num = ~0u;

  __device__ __forceinline__ bool has(uint32_t key) const { return key - first <= last - first; }
};

__device__ __forceinline__ KeyInterval first_interval(const KeyRange& range, uint32_t count) {
  if (count <= range.upper) {
    return {1u << 31, ~0u, count};
  }
  return {range.least, range.most, count - range.upper};
}

// Clears the digits for the first count. A __syncthreads has to follow.
template <int kThreads>
__device__ __forceinline__ void clear_digits(MarkScratch& scratch) {
  for (int i = threadIdx.x; i < device::kRadixDigits; i += kThreads) {
    scratch.histogram[i] = 0;
  }
}

// Narrows the interval to the digit of 2^shift keys in which the last marked keys are. The digits have been counted, and
// a __syncthreads has followed. Ends with one.
template <int kThreads>
__device__ __forceinline__ void narrow(KeyInterval& interval, int shift, MarkScratch& scratch) {
  constexpr int kOwn = 2;  // digits of a thread, of which the first threads have the largest
  constexpr int kCounting = device::kRadixDigits / kOwn / device::kWarpSize;  // warps
  static_assert(kCounting * device::kWarpSize <= kThreads);
  const int lane = threadIdx.x % device::kWarpSize, warp = threadIdx.x / device::kWarpSize;
  const int upper_digit = device::kRadixDigits - 1 - kOwn * static_cast<int>(threadIdx.x);
  uint2 own = make_uint2(0, 0);
  uint32_t inclusive = 0;
  if (warp < kCounting) {
    own = *reinterpret_cast<const uint2*>(&scratch.histogram[upper_digit - 1]);
    inclusive = own.x + own.y;
#pragma unroll
    for (int offset = 1; offset < device::kWarpSize; offset *= 2) {
      const uint32_t before = __shfl_up_sync(device::kFullMask, inclusive, offset);
      inclusive += lane >= offset ? before : 0;
    }
    if (lane == device::kWarpSize - 1) {
      scratch.warp_sums[warp] = inclusive;
    }
  }
  __syncthreads();
  uint32_t above = inclusive - own.x - own.y;
#pragma unroll
  for (int i = 0; i < kCounting - 1; ++i) {
    above += i < warp ? scratch.warp_sums[i] : 0;
  }
  if (warp < kCounting && above < interval.remaining && above + own.x + own.y >= interval.remaining) {
    const bool upper = above + own.y >= interval.remaining;
    const uint32_t in_digit = upper ? own.y : own.x;
    scratch.digit = upper ? upper_digit : upper_digit - 1;
    scratch.remaining = interval.remaining - above - (upper ? 0 : own.y);
    scratch.in_digit = in_digit;
    scratch.num_ranked = 0;
    scratch.ranked[min(in_digit, kMostRanked)] = 0;  // below all, where the number is odd
  }
  __syncthreads();
  interval.first += scratch.digit << shift;
  interval.last = min(interval.last, interval.first + (1u << shift) - 1);
  interval.remaining = scratch.remaining;
  interval.num = scratch.in_digit;
}

// The words of 32 keys that a warp looks at.
struct WordSpan {
  int begin;
  int end;
};
template <int kThreads>
__device__ __forceinline__ WordSpan warp_words(int num) {
  constexpr int kWarps = kThreads / device::kWarpSize;
  const int words = (num + 31) / 32;
  const int each = (words + kWarps - 1) / kWarps;
  const int begin = min(static_cast<int>(threadIdx.x) / device::kWarpSize * each, words);
  return {begin, min(begin + each, words)};
}

// Calls f(word, keys, exist) for the words of this warp, kBatch of them at a time, so that latencies overlap: the lane's
// keys, and whether there are any.
template <int kThreads, int kBatch, class F>
__device__ __forceinline__ void for_words(const uint32_t* keys, int num, F&& f) {
  const WordSpan span = warp_words<kThreads>(num);
  for (int word = span.begin; word < span.end; word += kBatch) {
    uint32_t batch[kBatch];
    bool exist[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int p = (word + i) * 32 + static_cast<int>(threadIdx.x) % 32;
      exist[i] = word + i < span.end && p < num;
      batch[i] = exist[i] ? keys[p] : 0;
    }
    f(word, batch, exist);
  }
}

// Marks the keys above the interval, and the first `remaining` in it of those that are few.
template <int kThreads>
__device__ __forceinline__ void mark_ranked(const uint32_t* keys, int num, const KeyInterval& interval,
                                            uint32_t* marked, MarkScratch& scratch) {
  constexpr int kBatch = 4;
  const int lane = threadIdx.x % device::kWarpSize;
  const uint32_t before = (1u << lane) - 1;
  for_words<kThreads, kBatch>(keys, num, [&](int word, const auto& batch, const auto& exist) {
    uint32_t inside[kBatch];
    uint32_t all_inside = 0;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const uint32_t above = __ballot_sync(device::kFullMask, exist[i] && batch[i] > interval.last);
      inside[i] = __ballot_sync(device::kFullMask, exist[i] && interval.has(batch[i]));
      all_inside += __popc(inside[i]);
      const bool word_exists = __any_sync(device::kFullMask, exist[i]);
      if (lane == i && word_exists) {
        marked[word + i] = above;
      }
    }
    if (all_inside != 0) {
      uint32_t place = 0;
      if (lane == 0) {
        place = atomicAdd(&scratch.num_ranked, all_inside);
      }
      place = __shfl_sync(device::kFullMask, place, 0);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if ((inside[i] >> lane & 1) != 0) {
          const auto p = static_cast<uint32_t>((word + i) * 32 + lane);
          scratch.ranked[place + __popc(inside[i] & before)] = uint64_t{batch[i]} << 32 | ~p;
        }
        place += __popc(inside[i]);
      }
    }
  });
  __syncthreads();
  if (threadIdx.x < interval.num) {
    const uint64_t own = scratch.ranked[threadIdx.x];
    uint32_t larger = 0;
#pragma unroll 4
    for (uint32_t i = 0; i < interval.num; i += 2) {
      const auto pair = *reinterpret_cast<const ulonglong2*>(&scratch.ranked[i]);
      larger += pair.x > own ? 1 : 0;
      larger += pair.y > own ? 1 : 0;
    }
    if (larger < interval.remaining) {
      const uint32_t p = ~static_cast<uint32_t>(own);
      atomicOr(&marked[p / 32], 1u << (p % 32));
    }
  }
  __syncthreads();
}

// The same where the interval is one key that many have.
template <int kThreads>
__device__ __forceinline__ void mark_ties(const uint32_t* keys, int num, const KeyInterval& interval,
                                          uint32_t* marked, MarkScratch& scratch) {
  constexpr int kBatch = 4;
  const int lane = threadIdx.x % device::kWarpSize, warp = threadIdx.x / device::kWarpSize;
  const uint32_t key = interval.first, before = (1u << lane) - 1;
  uint32_t equal = 0;
  for_words<kThreads, kBatch>(keys, num, [&](int, const auto& batch, const auto& exist) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      equal += exist[i] && batch[i] == key ? 1 : 0;
    }
  });
  equal = __reduce_add_sync(device::kFullMask, equal);
  if (lane == 0) {
    scratch.warp_sums[warp] = equal;
  }
  __syncthreads();
  equal = 0;
  for (int i = 0; i < warp; ++i) {
    equal += scratch.warp_sums[i];
  }
  for_words<kThreads, kBatch>(keys, num, [&](int word, const auto& batch, const auto& exist) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const uint32_t ties = __ballot_sync(device::kFullMask, exist[i] && batch[i] == key);
      const bool taken = (ties >> lane & 1) != 0 && equal + __popc(ties & before) < interval.remaining;
      const uint32_t bits = __ballot_sync(device::kFullMask, taken || (exist[i] && batch[i] > key));
      const bool word_exists = __any_sync(device::kFullMask, exist[i]);
      if (lane == 0 && word_exists) {
        marked[word + i] = bits;
      }
      equal += __popc(ties);
    }
  });
  __syncthreads();
}

// Sets the bits of the `count` largest of `num` keys in `marked`, the first of equal ones, and clears the others.
// clear_digits() and a __syncthreads have come before. Every thread of the block calls it when all keys are there. Ends
// with a __syncthreads.
template <int kThreads>
__device__ inline void mark_largest(const uint32_t* keys, int num, uint32_t count, const KeyRange& range,
                                    uint32_t* marked, MarkScratch& scratch) {
  KeyInterval interval = first_interval(range, count);
  for (bool cleared = true; interval.first < interval.last && interval.num > kMostRanked; cleared = false) {
    if (!cleared) {
      clear_digits<kThreads>(scratch);
      __syncthreads();
    }
    const int shift = max(0, 32 - __clz(interval.last - interval.first) - 9);
    device::for_own_keys<kThreads>(keys, num, [&](uint32_t key) {
      if (interval.has(key)) {
        atomicAdd(&scratch.histogram[(key - interval.first) >> shift], 1u);
      }
    });
    __syncthreads();
    narrow<kThreads>(interval, shift, scratch);
  }
  if (interval.num <= kMostRanked) {
    mark_ranked<kThreads>(keys, num, interval, marked, scratch);
  } else {
    mark_ties<kThreads>(keys, num, interval, marked, scratch);
  }
}

// Calls f(rank, p) for the marked positions p in ascending order of both. Each warp takes its words, a lane a word.
template <int kThreads, class F>
__device__ __forceinline__ void for_marked(const uint32_t* marked, int num, F&& f) {
  const int lane = threadIdx.x % device::kWarpSize;
  const WordSpan span = warp_words<kThreads>(num);
  uint32_t before = 0;  // marked ones in the words before
#pragma unroll 4
  for (int word = lane; word < span.begin; word += device::kWarpSize) {
    before += __popc(marked[word]);
  }
  before = __reduce_add_sync(device::kFullMask, before);
  for (int first = span.begin; first < span.end; first += device::kWarpSize) {
    const int word = first + lane;
    uint32_t bits = word < span.end ? marked[word] : 0;
    const auto own = static_cast<uint32_t>(__popc(bits));
    uint32_t inclusive = own;
#pragma unroll
    for (int offset = 1; offset < device::kWarpSize; offset *= 2) {
      const uint32_t below = __shfl_up_sync(device::kFullMask, inclusive, offset);
      inclusive += lane >= offset ? below : 0;
    }
    for (uint32_t rank = before + inclusive - own; bits != 0; bits &= bits - 1, ++rank) {
      f(rank, word * 32 + __ffs(static_cast<int>(bits)) - 1);
    }
    before += __shfl_sync(device::kFullMask, inclusive, device::kWarpSize - 1);
  }
}

// ---- a block

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

struct DecodeShared {
  device::Barrier sums_arrived;    // log sums of all shares of the cluster
  device::Barrier keys_arrived;    // keys of the other blocks
  device::Barrier states_welcome;  // an arrival from every other block, which has room for states
  device::Barrier states_arrived;  // states of the other blocks
  alignas(16) LogSum shares[kShares][16];
  LogSum warps[kDecodeMostWarps][16];
  KeyRange ranges[kShares];  // of the keys of the other blocks; they also say that these have read the sums
  KeyRange warp_ranges[kDecodeMostWarps];
  float normalizer[16];
  MarkScratch mark;
};

template <typename T>
struct DecodeParams {
  AttendParams<T> attend;
  DecodePlan plan;
  device::FastDivisor key_rows;   // of a page and head
  device::FastDivisor page_size;  // tokens
  // With a stride, leaders come first, in a launch of their own: other rows read their lists.
  bool leaders = true;
  LeafPools leaves;  // only with packed tokens
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
  __device__ __forceinline__ float* scores() const {
    return reinterpret_cast<float*>(dynamic + params.plan.places.scores);
  }
  __device__ __forceinline__ float* span_scores() const {
    return reinterpret_cast<float*>(dynamic + params.plan.places.span_scores);
  }
  __device__ __forceinline__ uint32_t* keys() const {
    return reinterpret_cast<uint32_t*>(dynamic + params.plan.places.keys);
  }
  __device__ __forceinline__ float* warp_sums() const {
    return reinterpret_cast<float*>(dynamic + params.plan.places.keys);
  }
  __device__ __forceinline__ int32_t* list(int which) const {
    return reinterpret_cast<int32_t*>(dynamic + params.plan.places.lists) + which * top_k();
  }
  __device__ __forceinline__ uint32_t* rows(int which) const {
    const int slots = params.plan.shares * ((top_k() + kShares - 1) / kShares);
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

// Row `at` of the chunk and its K/V heads. Every thread of the block calls it.
template <class Tr>
__device__ __forceinline__ WalkRow find_row(const AttendParams<typename Tr::T>& attend, uint32_t at) {
  const uint32_t heads = attend.layout.num_kv_heads;
  WalkRow walk;
  walk.at = at;
  walk.row = attend.chunk.first + at / heads;
  walk.head = static_cast<int>(at % heads);
  if (attend.sequences.num_sequences == 1) {
    walk.query = describe_row(attend, walk.row, 0);
    return walk;
  }
  int begun = 0;  // sequences that begin at or before the row
  for (int first = 0; first < attend.sequences.num_sequences; first += Tr::kThreads) {
    const int sequence = first + static_cast<int>(threadIdx.x);
    begun += __syncthreads_count(sequence < attend.sequences.num_sequences &&
                                 attend.sequences.cu_q[sequence] <= walk.row);
  }
  walk.query = describe_row(attend, walk.row, max(begun - 1, 0));
  return walk;
}

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
