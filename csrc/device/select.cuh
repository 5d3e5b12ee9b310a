// Exact selection and sorting within one block, on integer keys in shared or global memory.
#pragma once

#include <cstdint>

#include "device/reduce.cuh"

namespace htree::device {

// Every thread of a block of kThreads must call. Returns the sum of `value` over the threads before this one;
// `total` is the sum over all. `scratch` holds kThreads / 32 values in shared memory. Costs two
// __syncthreads, the second of which frees the scratch.
template <int kThreads>
__device__ __forceinline__ uint32_t block_exclusive_sum(uint32_t value, uint32_t* scratch, uint32_t& total) {
  constexpr int kWarps = kThreads / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  uint32_t inclusive = value;
#pragma unroll
  for (int offset = 1; offset < kWarpSize; offset *= 2) {
    const uint32_t below = __shfl_up_sync(kFullMask, inclusive, offset);
    inclusive += lane >= offset ? below : 0;
  }
  if (lane == kWarpSize - 1) {
    scratch[warp] = inclusive;
  }
  __syncthreads();
  uint32_t before = 0;
  total = 0;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) {
    const uint32_t sum = scratch[i];
    before += i < warp ? sum : 0;
    total += sum;
  }
  __syncthreads();
  return before + inclusive - value;
}

// The count-th largest of `num` keys, 1 <= count <= num.
struct Threshold {
  uint32_t key;    // every larger key is among the `count` largest
  uint32_t equal;  // how many keys equal to it are among them too
};

constexpr int kRadixDigits = 512;

struct RadixScratch {
  alignas(8) uint32_t histogram[kRadixDigits];
  uint32_t warp_sums[32];
  uint32_t least, most;  // of the keys below 2^31
  uint32_t upper;        // number of the others
  uint32_t digit;
  uint32_t remaining;
  uint32_t inside;
};

// Calls f with the keys of this thread. Some are loaded before the first is used, so that their latencies overlap.
template <int kThreads, typename Index, typename F>
__device__ __forceinline__ void for_own_keys(const uint32_t* keys, Index num, F&& f) {
  constexpr int kBatch = 8;
  for (Index first = threadIdx.x; first < num; first += kBatch * kThreads) {
    uint32_t batch[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      batch[i] = first + i * kThreads < num ? keys[first + i * kThreads] : 0;
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i * kThreads < num) {
        f(batch[i]);
      }
    }
  }
}

// The smallest interval that holds all keys below 2^31, and the number of the other keys. Ends with a __syncthreads.
template <int kThreads, typename Index>
__device__ __forceinline__ void find_key_range(const uint32_t* keys, Index num, RadixScratch& scratch) {
  if (threadIdx.x == 0) {
    scratch.least = ~0u;
    scratch.most = 0;
    scratch.upper = 0;
  }
  uint32_t least = ~0u, most = 0, upper = 0;
  for_own_keys<kThreads>(keys, num, [&](uint32_t key) {
    const bool lower = key >> 31 == 0;
    least = min(least, key);
    most = max(most, lower ? key : 0);
    upper += lower ? 0 : 1;
  });
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    least = min(least, __shfl_xor_sync(kFullMask, least, offset));
    most = max(most, __shfl_xor_sync(kFullMask, most, offset));
    upper += __shfl_xor_sync(kFullMask, upper, offset);
  }
  __syncthreads();
  if (threadIdx.x % kWarpSize == 0) {
    atomicMin(&scratch.least, least);
    atomicMax(&scratch.most, most);
    atomicAdd(&scratch.upper, upper);
  }
  __syncthreads();
}

// The digit that holds the key which is `remaining`-th from above goes to scratch.digit, which key of that digit
// it is to scratch.remaining, and the number of the digit's keys to scratch.inside. Ends with a __syncthreads.
template <int kThreads>
__device__ __forceinline__ void find_digit(uint32_t remaining, RadixScratch& scratch) {
  constexpr int kOwn = 2;  // digits of a thread, of which the first threads have the largest
  static_assert(kOwn * kThreads >= kRadixDigits);
  const int upper_digit = kRadixDigits - 1 - kOwn * static_cast<int>(threadIdx.x);
  uint2 own = make_uint2(0, 0);
  if (upper_digit > 0) {
    own = *reinterpret_cast<const uint2*>(&scratch.histogram[upper_digit - 1]);
  }
  uint32_t total;
  const uint32_t above = block_exclusive_sum<kThreads>(own.x + own.y, scratch.warp_sums, total);
  if (above < remaining && above + own.x + own.y >= remaining) {
    const bool upper = above + own.y >= remaining;
    scratch.digit = upper ? upper_digit : upper_digit - 1;
    scratch.remaining = remaining - above - (upper ? 0 : own.y);
    scratch.inside = upper ? own.y : own.x;
  }
  __syncthreads();
}

// Keys from `first` to `last`. There are `inside` of them, the `remaining`-th largest of which is sought.
struct KeyInterval {
  uint32_t first;
  uint32_t last;
  uint32_t remaining;
  uint32_t inside;

  __device__ __forceinline__ bool contains(uint32_t key) const { return key - first <= last - first; }
};

// Where the count-th largest of `num` keys is: keys below 2^31 have the range [least, most], and `upper` others are
// not the bits of a float that is >= 0. A range, so that floats, of which most have few different exponents, fall into
// many digits.
__device__ __forceinline__ KeyInterval key_interval(uint32_t num, uint32_t count, uint32_t least,
                                                    uint32_t most, uint32_t upper) {
  return count <= upper ? KeyInterval{1u << 31, ~0u, count, upper}
                        : KeyInterval{least, most, count - upper, num - upper};
}

// Narrows an interval, nine bits a pass, until it holds `most_inside` keys at most, or one key however often. It counts
// in integers, so the order of arrival does not matter. Every thread of a block of kThreads must call, after a
// __syncthreads that follows the writing of the keys; all get the result.
template <int kThreads, typename Index>
__device__ __forceinline__ KeyInterval block_narrow(const uint32_t* keys, Index num, KeyInterval interval,
                                                    uint32_t most_inside, RadixScratch& scratch) {
  while (interval.first < interval.last && interval.inside > most_inside) {
    const int shift = max(0, 32 - __clz(interval.last - interval.first) - 9);
    for (int i = threadIdx.x; i < kRadixDigits; i += kThreads) {
      scratch.histogram[i] = 0;
    }
    __syncthreads();
    for_own_keys<kThreads>(keys, num, [&](uint32_t key) {
      if (interval.contains(key)) {
        atomicAdd(&scratch.histogram[(key - interval.first) >> shift], 1u);
      }
    });
    __syncthreads();
    find_digit<kThreads>(interval.remaining, scratch);
    interval.first += scratch.digit << shift;
    interval.last = min(interval.last, interval.first + (1u << shift) - 1);
    interval.remaining = scratch.remaining;
    interval.inside = scratch.inside;
  }
  return interval;
}

// The threshold of the `count` largest. Every thread of a block of kThreads must call, after a __syncthreads that
// follows the writing of the keys; all get the result.
template <int kThreads, typename Index>
__device__ inline Threshold block_radix_select(const uint32_t* keys, Index num, uint32_t count,
                                               RadixScratch& scratch) {
  find_key_range<kThreads>(keys, num, scratch);
  const KeyInterval range =
      key_interval(static_cast<uint32_t>(num), count, scratch.least, scratch.most, scratch.upper);
  const KeyInterval interval = block_narrow<kThreads>(keys, num, range, 0, scratch);
  return {interval.first, interval.remaining};
}
static_assert(kRadixDigits == 1 << 9);

// Bitonic sort of `size` keys, a power of two, ascending, in memory that the whole block sees. Every
// thread of the block must call, after a __syncthreads that follows the writing of the keys. The sort
// ends with a __syncthreads.
template <typename Key>
__device__ inline void block_sort(Key* keys, int64_t size) {
  for (int64_t span = 2; span <= size; span *= 2) {
    for (int64_t distance = span / 2; distance > 0; distance /= 2) {
      for (int64_t pair = threadIdx.x; pair < size / 2; pair += blockDim.x) {
        const int64_t low = 2 * pair - (pair & (distance - 1));
        const int64_t high = low + distance;
        const Key a = keys[low];
        const Key b = keys[high];
        if ((a > b) == ((low & span) == 0)) {
          keys[low] = b;
          keys[high] = a;
        }
      }
      __syncthreads();
    }
  }
}

}  // namespace htree::device
