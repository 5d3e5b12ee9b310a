// Exact choice of the largest keys of a row by a thread block. Keys are not 0. They lie in shared memory, or in device
// memory where a row is too long for that. Every thread of the block calls, and all get the result.
#pragma once

#include "device/select.cuh"

namespace htree::tree_attention {

// The chosen among 32 neighbouring places: how many keys before them are larger than the threshold, and equal to it.
struct WordRanks {
  uint32_t larger, equal;
};

// Keys order as scores do, which are never NaN; above that of +inf there are keys for what is forced or raised.
__device__ __forceinline__ uint32_t key_of_score(float score) {
  const uint32_t bits = __float_as_uint(score);
  return bits >> 31 != 0 ? ~bits : bits | 1u << 31;
}

template <int kThreads>
struct RowChoice {
  static constexpr int kWarps = kThreads / device::kWarpSize;
  // Keys from here on stand above all scores. The others have a range of their own: floats of one sign have few exponents,
  // and within their range they fall into many digits.
  static constexpr uint32_t kRaised = 0xfffffffdu;

  struct Shared {
    device::RadixScratch radix;
    uint32_t sums[kWarps];
  };

  uint32_t* keys;    // [num]
  WordRanks* words;  // [ceil(num / 32)], in shared memory
  int num;
  Shared& shared;

  // The threshold of the `count` largest, 1 <= count < num. Ends with a __syncthreads.
  __device__ __forceinline__ device::Threshold threshold(uint32_t count) const {
    device::RadixScratch& scratch = shared.radix;
    device::KeyInterval interval = find_interval(count);
    while (interval.first < interval.last && interval.inside > interval.remaining) {
      const int shift = max(0, 32 - __clz(interval.last - interval.first) - 9);
      for (int i = threadIdx.x; i < device::kRadixDigits; i += kThreads) {
        scratch.histogram[i] = 0;
      }
      __syncthreads();
      device::for_own_keys<kThreads>(keys, num, [&](uint32_t key) {
        if (interval.contains(key)) {
          atomicAdd(&scratch.histogram[(key - interval.first) >> shift], 1u);
        }
      });
      __syncthreads();
      device::find_digit<kThreads>(interval.remaining, scratch);
      interval.first += scratch.digit << shift;
      interval.last = min(interval.last, interval.first + (1u << shift) - 1);
      interval.remaining = scratch.remaining;
      interval.inside = scratch.inside;
    }
    // Either all keys of the interval are chosen, or it is one key.
    return interval.inside <= interval.remaining ? device::Threshold{interval.first - 1, 0}
                                                 : device::Threshold{interval.first, interval.remaining};
  }

  // Calls emit(rank, place) for the chosen places; of those equal to the threshold the first are. Ends with a __syncthreads.
  template <typename Emit>
  __device__ __forceinline__ void choose(const device::Threshold& threshold, Emit&& emit) const {
    count_words(threshold);
    rank_words();
    const unsigned below = (1u << lane()) - 1;
    for (int place = threadIdx.x; place < padded(); place += kThreads) {
      const uint32_t key = place < num ? keys[place] : 0;
      const bool is_larger = key > threshold.key, is_equal = place < num && key == threshold.key;
      const unsigned larger = __ballot_sync(device::kFullMask, is_larger);
      const unsigned equal = __ballot_sync(device::kFullMask, is_equal);
      if ((larger | equal) == 0) {
        continue;
      }
      const WordRanks ranks = words[place / 32];
      const uint32_t equal_rank = ranks.equal + __popc(equal & below);
      if (is_larger || (is_equal && equal_rank < threshold.equal)) {
        emit(static_cast<int>(ranks.larger + __popc(larger & below) + min(equal_rank, threshold.equal)),
             place);
      }
    }
    __syncthreads();
  }

  // Raises the chosen keys to `best` and those of the places behind them to `next`; the last place keeps its key.
  __device__ __forceinline__ void raise_neighbours(const device::Threshold& threshold, uint32_t best,
                                                   uint32_t next) const {
    // A key is read before its place is known, and no other thread reads it then.
    choose(threshold, [&](int, int place) {
      if (place != num - 1) {
        keys[place] = best;
      }
    });
    for (int tile = 0; tile < num - 1; tile += kThreads) {
      const int place = tile + static_cast<int>(threadIdx.x);
      const bool behind = place > 0 && place < num - 1 && keys[place] != best && keys[place - 1] == best;
      __syncthreads();
      if (behind) {
        keys[place] = next;
      }
      __syncthreads();
    }
  }

 private:
  __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x % device::kWarpSize); }
  // The places that whole warps go over.
  __device__ __forceinline__ int padded() const { return (num + 31) / 32 * 32; }

  __device__ __forceinline__ device::KeyInterval find_interval(uint32_t count) const {
    device::RadixScratch& scratch = shared.radix;
    uint32_t least = ~0u, most = 0, raised = 0;
    device::for_own_keys<kThreads>(keys, num, [&](uint32_t key) {
      const bool is_raised = key >= kRaised;
      least = min(least, key);
      most = max(most, is_raised ? 0 : key);
      raised += is_raised;
    });
    least = __reduce_min_sync(device::kFullMask, least);
    most = __reduce_max_sync(device::kFullMask, most);
    raised = __reduce_add_sync(device::kFullMask, raised);
    if (threadIdx.x == 0) {
      scratch.least = ~0u;
      scratch.most = scratch.upper = 0;
    }
    __syncthreads();
    if (lane() == 0) {
      atomicMin(&scratch.least, least);
      atomicMax(&scratch.most, most);
      atomicAdd(&scratch.upper, raised);
    }
    __syncthreads();
    const uint32_t above = scratch.upper;
    return count <= above ? device::KeyInterval{kRaised, ~0u, count, above}
                          : device::KeyInterval{scratch.least, scratch.most, count - above,
                                                static_cast<uint32_t>(num) - above};
  }

  // Leaves the numbers of larger and of equal keys of each word.
  __device__ __forceinline__ void count_words(const device::Threshold& threshold) const {
    for (int place = threadIdx.x; place < padded(); place += kThreads) {
      const uint32_t key = place < num ? keys[place] : 0;
      const unsigned larger = __ballot_sync(device::kFullMask, key > threshold.key);
      const unsigned equal = __ballot_sync(device::kFullMask, place < num && key == threshold.key);
      if (lane() == 0) {
        words[place / 32] = {static_cast<uint32_t>(__popc(larger)), static_cast<uint32_t>(__popc(equal))};
      }
    }
    __syncthreads();
  }

  // Replaces them by their sums over the words before.
  __device__ __forceinline__ void rank_words() const {
    const int used = (num + 31) / 32;
    WordRanks before = {0, 0};
    for (int tile = 0; tile < used; tile += kThreads) {
      const int word = tile + static_cast<int>(threadIdx.x);
      const WordRanks own = word < used ? words[word] : WordRanks{0, 0};
      uint32_t total;
      // A tile has 32 kThreads keys: the two fields cannot meet.
      static_assert(32 * kThreads < 1 << 16);
      const uint32_t sum =
          device::block_exclusive_sum<kThreads>(own.larger << 16 | own.equal, shared.sums, total);
      if (word < used) {
        words[word] = {before.larger + (sum >> 16), before.equal + (sum & 0xffffu)};
      }
      before.larger += total >> 16;
      before.equal += total & 0xffffu;
    }
    __syncthreads();
  }
};

}  // namespace htree::tree_attention
