// The selection of a layer by a cluster: each block weighs its own candidates, all blocks get all importances,
// and each finds the same list. docs/semantics/tree_attention.md §1.6
#pragma once

#include "device/sm90/cluster_memory.cuh"
#include "device/sm90/pdl.cuh"
#include "ops/selection/cuda/any/select_topk.cuh"
#include "ops/tree_cache/decode/sm90/block.cuh"

namespace htree::tree_cache {

constexpr float kNoScore = -__builtin_huge_valf();

// Merges two sums. Equal maxima count as they are, so that inf - inf is never formed.
__device__ __forceinline__ LogSum merge_log_sums(const LogSum& a, const LogSum& b) {
  const float max = fmaxf(a.max, b.max);
  const float sum_a = a.max == max ? a.sum : a.sum * device::exp2_flushed(a.max - max);
  const float sum_b = b.max == max ? b.sum : b.sum * device::exp2_flushed(b.max - max);
  return {max, sum_a + sum_b};
}

// The same of some sums `stride` apart. Their powers do not wait for one another.
template <int kNum>
__device__ __forceinline__ LogSum merge_log_sums(const LogSum* sums, int stride) {
  LogSum own[kNum];
  LogSum merged = {kNoScore, 0.0f};
#pragma unroll
  for (int i = 0; i < kNum; ++i) {
    own[i] = sums[i * stride];
    merged.max = fmaxf(merged.max, own[i].max);
  }
#pragma unroll
  for (int i = 0; i < kNum; ++i) {
    const float factor = own[i].max == merged.max ? 1.0f : device::exp2_flushed(own[i].max - merged.max);
    merged.sum += own[i].sum * factor;
  }
  return merged;
}

// log2 of the sum; an infinite maximum is the result, and a NaN stays.
__device__ __forceinline__ float log2_of(const LogSum& sum) {
  if (sum.sum != sum.sum) {
    return sum.sum;
  }
  return fabsf(sum.max) == -kNoScore ? sum.max : sum.max + log2f(sum.sum);
}

// Adds the scores of one share up for each head, and leaves the warps' parts in `parts`.
template <class Tr>
__device__ __forceinline__ void sum_share(const DecodeBlock<Tr>& block, const float* scores, int num,
                                          LogSum (&parts)[kDecodeMostWarps][16]) {
  const int head = threadIdx.x % Tr::kHeads;
  constexpr int kStep = Tr::kThreads / Tr::kHeads, kBatch = 12;
  LogSum sum = {kNoScore, 0.0f};
  for (int first = threadIdx.x / Tr::kHeads; first < num; first += kBatch * kStep) {
    float batch[kBatch];
    LogSum part = {kNoScore, 0.0f};
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int p = first + i * kStep;
      batch[i] = p < num ? scores[p * Tr::kHeads + head] : kNoScore;
      part.max = fmaxf(part.max, batch[i]);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const float power = batch[i] == part.max ? 1.0f : device::exp2_flushed(batch[i] - part.max);
      part.sum += first + i * kStep < num ? power : 0.0f;
    }
    sum = merge_log_sums(sum, part);
  }
#pragma unroll
  for (int offset = Tr::kHeads; offset < 32; offset *= 2) {
    LogSum other;
    other.max = __shfl_xor_sync(device::kFullMask, sum.max, offset);
    other.sum = __shfl_xor_sync(device::kFullMask, sum.sum, offset);
    sum = merge_log_sums(sum, other);
  }
  if (block.lane < Tr::kHeads) {
    parts[block.warp][head] = sum;
  }
}

// Gives every block of the cluster the log sums of this block's shares. `scores` is in shared memory, and all
// threads have written theirs. A block stores its own plainly: a kernel that was launched without clusters, as
// one block to a row is, stops at a st.async with an illegal instruction.
template <class Tr>
__device__ __forceinline__ void send_log_sums(const DecodeBlock<Tr>& block, const LayerSlots& slots,
                                              const float* scores) {
  const int shares = block.params.plan.shares, cluster = block.params.plan.cluster;
  const int own = slots.own(shares);
  for (int share = 0; share < shares; ++share) {
    const int num = max(0, min(own - share * slots.share, slots.share));
    auto& parts = block.shared.warps[share % 2];
    sum_share(block, scores + share * slots.share * kDecodeRate * Tr::kHeads, num * kDecodeRate, parts);
    // One for each share: the parts of the next stand elsewhere.
    __syncthreads();
    constexpr int kPairs = Tr::kHeads / 2;  // a message holds two heads
    if (static_cast<int>(threadIdx.x) < cluster * kPairs) {
      const int head = threadIdx.x % kPairs * 2;
      LogSum sums[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        sums[i] = merge_log_sums<Tr::kWarps>(&parts[0][head + i], 16);
      }
      auto* to = reinterpret_cast<float4*>(&block.shared.shares[block.rank * shares + share][head]);
      const auto packed = make_float4(sums[0].max, sums[0].sum, sums[1].max, sums[1].sum);
      const int other = static_cast<int>(threadIdx.x) / kPairs;
      if (other == block.rank) {
        *to = packed;
      } else {
        device::send_to_block(to, &block.shared.sums_arrived, static_cast<uint32_t>(other), packed);
      }
    }
  }
  __syncthreads();
}

// The bytes that send_log_sums() of the other blocks sends to this one.
template <class Tr>
__device__ __forceinline__ uint32_t arriving_sum_bytes(const DecodeBlock<Tr>& block) {
  return static_cast<uint32_t>((kShares - block.params.plan.shares) * Tr::kHeads) * sizeof(LogSum);
}

// Makes the normaliser of each head from all shares, once they have arrived. Costs one __syncthreads.
template <class Tr>
__device__ __forceinline__ void make_normalizers(const DecodeBlock<Tr>& block, uint32_t parity) {
  device::barrier_wait(&block.shared.sums_arrived, parity);
  const bool joint = block.attend().options.selection.importance == tree_attention::Importance::kExpJoint;
  if (block.warp == 0) {
    const int head = block.lane % Tr::kHeads;
    LogSum sum = {kNoScore, 0.0f};
    if (block.lane < block.attend().group) {
      sum = merge_log_sums<kShares>(&block.shared.shares[0][head], 16);
    }
    float normalizer = log2_of(sum);
    if (joint) {
      normalizer = sum.sum != sum.sum ? sum.sum : sum.max;
      normalizer = device::warp_reduce<device::MaxNan>(normalizer);
    }
    if (block.lane < Tr::kHeads) {
      block.shared.normalizer[head] = normalizer;
    }
  }
  __syncthreads();
}

// The keys of the block's own candidates, which order as select_topk.cuh says, and their way to the others, with what
// the block knows of their range.
template <class Tr>
__device__ __forceinline__ void send_keys(const DecodeBlock<Tr>& block, const LayerSlots& slots,
                                          const float* scores) {
  using Select = tree_attention::SelectTraits;
  const int own = slots.own(block.params.plan.shares) * kDecodeRate;
  const int first = slots.first * kDecodeRate;
  uint32_t* keys = block.keys() + first;
  const int group = block.attend().group;
  KeyRange range = no_keys();
  for (int i = threadIdx.x; i < own; i += Tr::kThreads) {
    float importance = 0.0f;
#pragma unroll
    for (int head = 0; head < Tr::kHeads; ++head) {
      if (head < group) {
        const float base = block.shared.normalizer[head];
        const float weight = device::exp2_flushed(scores[i * Tr::kHeads + head] - base);
        importance += base == kNoScore ? 0.0f : weight;
      }
    }
    const int p = first + i;
    const uint32_t key = importance != importance ? Select::kNan : __float_as_uint(importance);
    keys[i] = p == slots.num - 1 ? Select::kRightmost : p >= slots.num ? 0 : key;
    if (p < slots.num) {
      range.add(keys[i]);
    }
  }
  range.reduce_warp();
  if (block.lane == 0) {
    block.shared.warp_ranges[block.warp] = range;
  }
  __syncthreads();
  const int packs = own / 4;
  const int others = block.params.plan.cluster - 1;
  for (int i = threadIdx.x; i < packs * others; i += Tr::kThreads) {
    const int other = i / packs;
    auto* place = reinterpret_cast<float4*>(keys) + (i - other * packs);
    device::send_to_block(place, &block.shared.keys_arrived,
                          static_cast<uint32_t>(other + (other >= block.rank)), *place);
  }
  // Every block sends its range, though it may have no keys: no block goes on to the sums of the next layer before all
  // others have read those of this one.
  if (static_cast<int>(threadIdx.x) <= others) {
    range = block.shared.warp_ranges[0];
#pragma unroll
    for (int warp = 1; warp < Tr::kWarps; ++warp) {
      range.add(block.shared.warp_ranges[warp]);
    }
    const int other = threadIdx.x;
    KeyRange* to = &block.shared.ranges[block.rank];
    if (other == block.rank) {
      *to = range;
    } else {
      device::send_to_block(reinterpret_cast<float4*>(to), &block.shared.keys_arrived, other,
                            *reinterpret_cast<const float4*>(&range));
    }
  }
}

// The bytes that send_keys() of the other blocks sends to this one.
template <class Tr>
__device__ __forceinline__ uint32_t arriving_key_bytes(const DecodeBlock<Tr>& block,
                                                       const LayerSlots& slots) {
  const int keys = (slots.slots - slots.own(block.params.plan.shares)) * kDecodeRate;
  return static_cast<uint32_t>(keys * 4 +
                               (block.params.plan.cluster - 1) * static_cast<int>(sizeof(KeyRange)));
}

// The candidates whose keys are in an interval, gathered in the memory of its histogram.
struct Undecided {
  uint32_t key;
  uint32_t place;
};
constexpr int kMostUndecided = device::kRadixDigits * sizeof(uint32_t) / sizeof(Undecided);

// Sets the bits of the candidates with larger keys than the interval's. Those inside are gathered if they are few; else
// they have one key, and their bits go to scratch.histogram.
template <class Tr>
__device__ __forceinline__ void mark_larger(const DecodeBlock<Tr>& block, int num, bool few,
                                            const device::KeyInterval& interval) {
  const uint32_t* keys = block.keys();
  device::RadixScratch& scratch = block.shared.radix;
  auto* undecided = reinterpret_cast<Undecided*>(scratch.histogram);
  const int words = (num + 31) / 32;
  constexpr int kBatch = 4;  // words whose keys are loaded together
  for (int first = block.warp * kBatch; first < words; first += Tr::kWarps * kBatch) {
    uint32_t batch[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int p = (first + i) * 32 + block.lane;
      batch[i] = p < num ? keys[p] : 0;
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int word = first + i, p = word * 32 + block.lane;
      const uint32_t larger = __ballot_sync(device::kFullMask, p < num && batch[i] > interval.last);
      const uint32_t inside = __ballot_sync(device::kFullMask, p < num && interval.contains(batch[i]));
      if (word < words && block.lane == 0) {
        block.selected()[word] = larger;
        if (!few) {
          scratch.histogram[word] = inside;
        }
      }
      if (few && inside != 0) {
        uint32_t at = 0;
        if (block.lane == 0) {
          at = atomicAdd(&block.shared.num_undecided, __popc(inside));
        }
        at = __shfl_sync(device::kFullMask, at, 0);
        if ((inside >> block.lane & 1) != 0) {
          undecided[at + __popc(inside & ((1u << block.lane) - 1))] = {batch[i], static_cast<uint32_t>(p)};
        }
      }
    }
  }
}

// Sets the bits of the `remaining` largest of `inside` gathered candidates; of equal keys the first places count. The
// order in which they were gathered does not matter.
template <class Tr>
__device__ __forceinline__ void mark_undecided(const DecodeBlock<Tr>& block,
                                               const device::KeyInterval& interval) {
  constexpr int kLanes = 4, kAtOnce = Tr::kThreads / kLanes;  // four lanes compare one candidate with all
  const auto* undecided = reinterpret_cast<const Undecided*>(block.shared.radix.histogram);
  const auto inside = static_cast<int>(interval.inside);
  for (int first = 0; first < inside; first += kAtOnce) {
    const int i = first + static_cast<int>(threadIdx.x) / kLanes;
    const Undecided own = undecided[min(i, inside - 1)];
    uint32_t before = 0;
#pragma unroll 4
    for (int j = block.lane % kLanes; j < inside; j += kLanes) {
      const Undecided other = undecided[j];
      before += other.key > own.key || (other.key == own.key && other.place < own.place) ? 1 : 0;
    }
    before += __shfl_xor_sync(device::kFullMask, before, 1);
    before += __shfl_xor_sync(device::kFullMask, before, 2);
    if (i < inside && block.lane % kLanes == 0 && before < interval.remaining) {
      atomicOr(&block.selected()[own.place / 32], 1u << (own.place % 32));
    }
  }
}

// Sets the bits of the first `remaining` candidates of which scratch.histogram has the bits. Each thread has the words
// that it has in list_selected().
template <class Tr>
__device__ __forceinline__ void mark_first(const DecodeBlock<Tr>& block, int words, uint32_t remaining) {
  device::RadixScratch& scratch = block.shared.radix;
  const int each = (words + Tr::kThreads - 1) / Tr::kThreads;
  const int begin = threadIdx.x * each, end = min(begin + each, words);
  uint32_t own = 0, total;
  for (int word = begin; word < end; ++word) {
    own += __popc(scratch.histogram[word]);
  }
  uint32_t before = device::block_exclusive_sum<Tr::kThreads>(own, scratch.warp_sums, total);
  for (int word = begin; word < end; ++word) {
    for (uint32_t equal = scratch.histogram[word]; equal != 0 && before < remaining; ++before) {
      const uint32_t rest = equal & (equal - 1);
      block.selected()[word] |= equal ^ rest;
      equal = rest;
    }
  }
}

// Writes the nodes whose bits are set to `next`, ascending. Ends with a __syncthreads.
template <class Tr>
__device__ __forceinline__ void list_selected(const DecodeBlock<Tr>& block, int words, const int32_t* list,
                                              int32_t* next) {
  const int each = (words + Tr::kThreads - 1) / Tr::kThreads;
  const int begin = threadIdx.x * each, end = min(begin + each, words);
  uint32_t own = 0, total;
  for (int word = begin; word < end; ++word) {
    own += __popc(block.selected()[word]);
  }
  uint32_t at = device::block_exclusive_sum<Tr::kThreads>(own, block.shared.radix.warp_sums, total);
  for (int word = begin; word < end; ++word) {
    for (uint32_t bits = block.selected()[word]; bits != 0; bits &= bits - 1) {
      const int p = word * 32 + __ffs(static_cast<int>(bits)) - 1;
      next[at++] = static_cast<int32_t>(node_of(list, static_cast<uint32_t>(p), kDecodeRate));
    }
  }
  __syncthreads();
}

// Writes the nodes of the `count` candidates of largest key to `next`, ascending, and their bits. Every thread
// calls it when all keys are there; `range` is theirs. Ends with a __syncthreads.
template <class Tr>
__device__ __forceinline__ void select_largest(const DecodeBlock<Tr>& block, const LayerSlots& slots,
                                               const KeyRange& range, int count, const int32_t* list,
                                               int32_t* next) {
  if (threadIdx.x == 0) {
    block.shared.num_undecided = 0;
  }
  const device::KeyInterval all = device::key_interval(
      static_cast<uint32_t>(slots.num), static_cast<uint32_t>(count), range.least, range.most, range.upper);
  const device::KeyInterval interval =
      device::block_narrow<Tr::kThreads>(block.keys(), slots.num, all, kMostUndecided, block.shared.radix);
  const bool few = interval.inside <= kMostUndecided;
  const int words = (slots.num + 31) / 32;
  __syncthreads();  // num_undecided is 0
  mark_larger(block, slots.num, few, interval);
  __syncthreads();
  if (few) {
    mark_undecided(block, interval);
    __syncthreads();
  } else {
    mark_first(block, words, interval.remaining);
  }
  list_selected(block, words, list, next);
}

// Raises the keys of the selected candidates above all others, and those of the candidates behind them above
// the rest (§1.6, open_next). Ends with a __syncthreads.
template <class Tr>
__device__ __forceinline__ void raise_neighbours(const DecodeBlock<Tr>& block, const LayerSlots& slots) {
  using Select = tree_attention::SelectTraits;
  uint32_t* keys = block.keys();
  const uint32_t* selected = block.selected();
  for (int p = threadIdx.x; p < slots.num - 1; p += Tr::kThreads) {
    const bool best = (selected[p / 32] >> (p % 32) & 1) != 0;
    const bool behind = p > 0 && (selected[(p - 1) / 32] >> ((p - 1) % 32) & 1) != 0;
    if (best || behind) {
      keys[p] = best ? Select::kBest : Select::kNeighbour;
    }
  }
  __syncthreads();
}

// Writes the list of the layer below, ascending, and the bits of the selected candidates. Every thread
// calls it when all keys are there. Ends with a __syncthreads.
template <class Tr>
__device__ __forceinline__ void write_selection(const DecodeBlock<Tr>& block, const LayerSlots& slots,
                                                const int32_t* list, int32_t* next) {
  const int top_k = block.top_k();
  device::RadixScratch& scratch = block.shared.radix;
  __syncthreads();  // the block's own range is there too
  KeyRange range = block.lane < block.params.plan.cluster ? block.shared.ranges[block.lane] : no_keys();
  range.reduce_warp();
  const auto best = static_cast<int>(
      tree_attention::best_with_neighbours(block.attend().options.selection, top_k, slots.num));
#pragma unroll 1
  for (int count = best > 0 ? best : top_k;; count = top_k) {
    select_largest(block, slots, range, count, list, next);
    if (count == top_k) {
      return;
    }
    raise_neighbours(block, slots);
    device::find_key_range<Tr::kThreads>(block.keys(), slots.num, scratch);
    range = {scratch.least, scratch.most, scratch.upper, 0};
  }
}

// The next list of a leader where every candidate is opened. Ends with a __syncthreads.
template <class Tr>
__device__ __forceinline__ void open_all(const DecodeBlock<Tr>& block, const LayerSlots& slots,
                                         const int32_t* list, int32_t* next) {
  for (int i = threadIdx.x; i < block.top_k(); i += Tr::kThreads) {
    next[i] = i < slots.num ? static_cast<int32_t>(node_of(list, static_cast<uint32_t>(i), kDecodeRate)) : -1;
  }
  __syncthreads();
}

// ---- rows that use the lists of a leader

// Before the first read of a list that the launch before this one writes.
template <class Tr>
__device__ __forceinline__ void wait_for_lists(const DecodeBlock<Tr>& block) {
  if (block.attend().options.lists_follow) {
    device::pdl_wait();
  }
}

// Ends with a __syncthreads.
template <class Tr>
__device__ __forceinline__ void load_list(const DecodeBlock<Tr>& block, int layer, int32_t* to) {
  const int32_t* from = list_of(block.attend(), block.walk, layer);
  wait_for_lists(block);
  for (int i = threadIdx.x; i < block.top_k(); i += Tr::kThreads) {
    to[i] = from[i];
  }
  __syncthreads();
}

// Marks the candidates of `list` that `next` opens. Ends with a __syncthreads.
template <class Tr>
__device__ __forceinline__ void mark_next(const DecodeBlock<Tr>& block, const LayerSlots& slots,
                                          const int32_t* list, const int32_t* next) {
  for (int i = threadIdx.x; i < (slots.num + 31) / 32; i += Tr::kThreads) {
    block.selected()[i] = 0;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < block.top_k(); i += Tr::kThreads) {
    const int p = next[i] < 0 ? -1 : candidate_of(list, slots.slots, next[i], kDecodeRate);
    if (p >= 0 && p < slots.num) {
      atomicOr(&block.selected()[p / 32], 1u << (p % 32));
    }
  }
  __syncthreads();
}

// Stores a leader's list where other rows of the call and later calls find it.
template <class Tr>
__device__ __forceinline__ void store_list(const DecodeBlock<Tr>& block, int layer, int64_t entry,
                                           const int32_t* list) {
  const auto& attend = block.attend();
  const auto store = [&](int32_t* to) {
    for (int i = threadIdx.x; i < block.top_k(); i += Tr::kThreads) {
      to[i] = list[i];
    }
  };
  if (block.rank == 0 && attend.chunk.lists != nullptr) {
    store(own_list(attend, block.walk, layer));
  }
  if (block.rank == 0 && entry >= 0) {
    const int64_t layers = attend.layout.num_layers, heads = attend.layout.num_kv_heads;
    store(attend.sequences.new_lists + ((entry * layers + layer) * heads + block.walk.head) * block.top_k());
  }
}

}  // namespace htree::tree_cache
