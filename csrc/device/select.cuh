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

struct RadixScratch {
  uint32_t histogram[256];
  uint32_t warp_sums[8];
  uint32_t digit;
  uint32_t remaining;
};

// Works from the most significant digit down, eight bits a pass. It counts in integers, so the order of
// arrival does not matter. Every thread of a block of 256 must call, after a __syncthreads that follows the
// writing of the keys; all get the result.
__device__ inline Threshold block_radix_select(const uint32_t* keys, int64_t num, uint32_t count,
                                               RadixScratch& scratch) {
  constexpr int kThreads = 256;
  uint32_t prefix = 0;
  uint32_t remaining = count;
  for (int shift = 24; shift >= 0; shift -= 8) {
    const uint32_t known = shift == 24 ? 0 : ~0u << (shift + 8);
    scratch.histogram[threadIdx.x] = 0;
    __syncthreads();
    for (int64_t i = threadIdx.x; i < num; i += kThreads) {
      const uint32_t key = keys[i];
      if ((key & known) == prefix) {
        atomicAdd(&scratch.histogram[(key >> shift) & 255], 1u);
      }
    }
    __syncthreads();
    const uint32_t digit = kThreads - 1 - threadIdx.x;  // the largest digit first
    const uint32_t own = scratch.histogram[digit];
    uint32_t total;
    const uint32_t above = block_exclusive_sum<kThreads>(own, scratch.warp_sums, total);
    if (above < remaining && above + own >= remaining) {
      scratch.digit = digit;
      scratch.remaining = remaining - above;
    }
    __syncthreads();
    prefix |= scratch.digit << shift;
    remaining = scratch.remaining;
  }
  return {prefix, remaining};
}

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
