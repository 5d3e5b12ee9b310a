// The selection of a layer by a cluster: each block weighs its own candidates, all blocks get all importances,
// and each finds the same list. docs/semantics/tree_attention.md §1.6
#pragma once

#include "device/hopper/cluster_memory.cuh"
#include "ops/tree_attention/stages/select/select_topk.cuh"
#include "ops/tree_cache/decode/block.cuh"

namespace htree::tree_cache {

constexpr float kNoScore = -__builtin_huge_valf();

// Merges two sums. Equal maxima count as they are, so that inf - inf is never formed.
__device__ __forceinline__ LogSum merge_log_sums(const LogSum& a, const LogSum& b) {
  const float max = fmaxf(a.max, b.max);
  const float sum_a = a.max == max ? a.sum : a.sum * device::exp2_flushed(a.max - max);
  const float sum_b = b.max == max ? b.sum : b.sum * device::exp2_flushed(b.max - max);
  return {max, sum_a + sum_b};
}

// log2 of the sum; an infinite maximum is the result, and a NaN stays.
__device__ __forceinline__ float log2_of(const LogSum& sum) {
  if (sum.sum != sum.sum) {
    return sum.sum;
  }
  return fabsf(sum.max) == -kNoScore ? sum.max : sum.max + log2f(sum.sum);
}

// Adds the scores of one share up for each head, and leaves the warps' parts in shared.warps.
template <class Tr>
__device__ __forceinline__ void sum_share(const DecodeBlock<Tr>& block, const float* scores, int num) {
  const int head = threadIdx.x % Tr::kHeads;
  constexpr int kStep = Tr::kThreads / Tr::kHeads;
  LogSum sum = {kNoScore, 0.0f};
  for (int p = threadIdx.x / Tr::kHeads; p < num; p += kStep) {
    sum.max = fmaxf(sum.max, scores[p * Tr::kHeads + head]);
  }
  for (int p = threadIdx.x / Tr::kHeads; p < num; p += kStep) {
    const float score = scores[p * Tr::kHeads + head];
    sum.sum += score == sum.max ? 1.0f : device::exp2_flushed(score - sum.max);
  }
#pragma unroll
  for (int offset = Tr::kHeads; offset < 32; offset *= 2) {
    LogSum other;
    other.max = __shfl_xor_sync(device::kFullMask, sum.max, offset);
    other.sum = __shfl_xor_sync(device::kFullMask, sum.sum, offset);
    sum = merge_log_sums(sum, other);
  }
  if (block.lane < Tr::kHeads) {
    block.shared.warps[block.warp][head] = sum;
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
    sum_share(block, scores + share * slots.share * kDecodeRate * Tr::kHeads, num * kDecodeRate);
    __syncthreads();
    constexpr int kPairs = Tr::kHeads / 2;  // a message holds two heads
    if (static_cast<int>(threadIdx.x) < cluster * kPairs) {
      const int head = threadIdx.x % kPairs * 2;
      LogSum sums[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        sums[i] = block.shared.warps[0][head + i];
#pragma unroll
        for (int warp = 1; warp < Tr::kWarps; ++warp) {
          sums[i] = merge_log_sums(sums[i], block.shared.warps[warp][head + i]);
        }
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
    __syncthreads();
  }
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
  const bool joint = block.attend().options.importance == tree_attention::Importance::kExpJoint;
  if (block.warp == 0) {
    const int head = block.lane % Tr::kHeads;
    LogSum sum = {kNoScore, 0.0f};
    if (block.lane < block.attend().group) {
      sum = block.shared.shares[0][head];
      for (int share = 1; share < kShares; ++share) {
        sum = merge_log_sums(sum, block.shared.shares[share][head]);
      }
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

// The keys of the block's own candidates, which order as select_topk.cuh says, and their way to the others.
template <class Tr>
__device__ __forceinline__ void send_keys(const DecodeBlock<Tr>& block, const LayerSlots& slots,
                                          const float* scores) {
  using Select = tree_attention::SelectTraits;
  const int own = slots.own(block.params.plan.shares) * kDecodeRate;
  const int first = slots.first * kDecodeRate;
  uint32_t* keys = block.keys() + first;
  const int group = block.attend().group;
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
    keys[i] = p == slots.num - 1         ? Select::kRightmost
              : p >= slots.num           ? 0
              : importance != importance ? Select::kNan
                                         : __float_as_uint(importance);
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
  // No block goes on to the sums of the next layer before all others have read those of this one.
  if (static_cast<int>(threadIdx.x) < others) {
    const int other = threadIdx.x + (static_cast<int>(threadIdx.x) >= block.rank);
    device::send_to_block(&block.shared.ready[block.rank], &block.shared.keys_arrived, other, 0.0f);
  }
}

// The bytes that send_keys() of the other blocks sends to this one.
template <class Tr>
__device__ __forceinline__ uint32_t arriving_key_bytes(const DecodeBlock<Tr>& block,
                                                       const LayerSlots& slots) {
  const int keys = (slots.slots - slots.own(block.params.plan.shares)) * kDecodeRate;
  return static_cast<uint32_t>(keys + block.params.plan.cluster - 1) * 4;
}

// Writes the nodes of the `count` candidates of largest key to `next`, ascending, and their bits. Every thread
// calls it when all keys are there. Ends with a __syncthreads.
template <class Tr>
__device__ __forceinline__ void select_largest(const DecodeBlock<Tr>& block, const LayerSlots& slots,
                                               int count, const int32_t* list, int32_t* next) {
  const uint32_t* keys = block.keys();
  DecodeShared& shared = block.shared;
  const device::Threshold threshold =
      device::block_radix_select<Tr::kThreads>(keys, slots.num, static_cast<uint32_t>(count), shared.radix);
  const int words = (slots.num + 31) / 32;
  const int each = (words + Tr::kWarps - 1) / Tr::kWarps;
  const int begin = min(block.warp * each, words), end = min(begin + each, words);
  uint32_t num_larger = 0, num_equal = 0;
#pragma unroll 4
  for (int p = begin * 32 + block.lane; p < min(end * 32, slots.num); p += 32) {
    num_larger += keys[p] > threshold.key ? 1 : 0;
    num_equal += keys[p] == threshold.key ? 1 : 0;
  }
  num_larger = __reduce_add_sync(device::kFullMask, num_larger);
  num_equal = __reduce_add_sync(device::kFullMask, num_equal);
  if (block.lane == 0) {
    shared.counts[0][block.warp] = num_larger;
    shared.counts[1][block.warp] = num_equal;
  }
  __syncthreads();
  num_larger = num_equal = 0;
  for (int warp = 0; warp < block.warp; ++warp) {
    num_larger += shared.counts[0][warp];
    num_equal += shared.counts[1][warp];
  }
  const uint32_t before = (1u << block.lane) - 1;
  constexpr int kBatch = 4;  // words whose keys are loaded together
  for (int first = begin; first < end; first += kBatch) {
    uint32_t batch[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int p = (first + i) * 32 + block.lane;
      batch[i] = p < slots.num ? keys[p] : 0;
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int word = first + i, p = word * 32 + block.lane;
      const bool exists = word < end && p < slots.num;
      const uint32_t larger = __ballot_sync(device::kFullMask, exists && batch[i] > threshold.key);
      const uint32_t equal = __ballot_sync(device::kFullMask, exists && batch[i] == threshold.key);
      const uint32_t larger_rank = num_larger + __popc(larger & before);
      const uint32_t equal_rank = num_equal + __popc(equal & before);
      const bool chosen =
          (larger >> block.lane & 1) != 0 || ((equal >> block.lane & 1) != 0 && equal_rank < threshold.equal);
      if (chosen) {
        next[larger_rank + min(equal_rank, threshold.equal)] =
            static_cast<int32_t>(node_of(list, static_cast<uint32_t>(p), kDecodeRate));
      }
      const uint32_t bits = __ballot_sync(device::kFullMask, chosen);
      if (block.lane == 0 && word < end) {
        block.selected()[word] = bits;
      }
      num_larger += __popc(larger);
      num_equal += __popc(equal);
    }
  }
  __syncthreads();
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
  const auto best = static_cast<int>(
      tree_attention::best_with_neighbours(block.attend().options.open_next, top_k, slots.num));
#pragma unroll 1
  for (int count = best > 0 ? best : top_k;; count = top_k) {
    select_largest(block, slots, count, list, next);
    if (count == top_k) {
      return;
    }
    raise_neighbours(block, slots);
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

// Ends with a __syncthreads.
template <class Tr>
__device__ __forceinline__ void load_list(const DecodeBlock<Tr>& block, int layer, int32_t* to) {
  const int32_t* from = list_of(block.attend(), block.walk, layer);
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
