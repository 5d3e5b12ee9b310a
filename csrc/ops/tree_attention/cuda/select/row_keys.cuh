// A row of importances in the registers of a block, and the search for the bin of its k-th largest.
#pragma once

#include "device/mma.cuh"
#include "ops/tree_attention/cuda/select/leader_select.h"

namespace htree::tree_attention {

constexpr int kSelectThreads = 256;
constexpr int kSelectWarps = kSelectThreads / 32;
constexpr int kSelectBins = 2048;
constexpr int kFinalists = 64;
constexpr int kMaxSelected = 1024;  // k

template <int kKeys>
struct SelectShared {
  static constexpr int kWords = kKeys * kSelectThreads / 32;
  alignas(16) uint32_t bins[kSelectBins + 4];  // the last ones take what lies outside
  uint64_t finalists[kFinalists];
  uint32_t above[kWords];
  uint32_t equal[kWords];
  int ids[kMaxSelected];
  int least[kSelectWarps], most[kSelectWarps];
  int scan[3][kSelectWarps];
  int bin, bin_above, bin_count, num_finalists;
};

// Sum over the threads before this one; `total` over all. One barrier; `scratch` holds kSelectWarps ints
// that nobody reads any more.
__device__ __forceinline__ int sum_before(int value, int* scratch, int* total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int inclusive = value;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int other = __shfl_up_sync(device::kFullMask, inclusive, offset);
    inclusive += lane >= offset ? other : 0;
  }
  if (lane == 31) {
    scratch[warp] = inclusive;
  }
  __syncthreads();
  const int of_warp = lane < kSelectWarps ? scratch[lane] : 0;
  *total = __reduce_add_sync(device::kFullMask, of_warp);
  return __reduce_add_sync(device::kFullMask, lane < warp ? of_warp : 0) + inclusive - value;
}

// Position of key i of this thread: i * 256 + thread. Groups of 4 keys are skipped as one where the row is
// shorter, so that the cost follows its length.
template <int kKeys>
struct RowKeys {
  static constexpr int kStep = 4;
  int key[kKeys];  // -1 past the end
  int used;        // keys of a thread that reach the end of the row

  // importance(p) of the positions p < count.
  template <typename F>
  __device__ __forceinline__ void load(int count, F importance) {
    used = (count + kSelectThreads - 1) / kSelectThreads;
#pragma unroll
    for (int base = 0; base < kKeys; base += kStep) {
      const bool whole = (base + kStep) * kSelectThreads <= count;
#pragma unroll
      for (int i = base; i < base + kStep; ++i) {
        const int position = i * kSelectThreads + static_cast<int>(threadIdx.x);
        key[i] = whole || position < count ? __float_as_int(importance(position)) : -1;
      }
    }
  }
  template <typename F>
  __device__ __forceinline__ void each(F f) const {
#pragma unroll
    for (int base = 0; base < kKeys; base += kStep) {
      if (base < used) {
#pragma unroll
        for (int i = base; i < base + kStep; ++i) {
          f(i, key[i]);
        }
      }
    }
  }
};

// Keys in [low, high], of which the `wanted` largest and everything above are chosen; `count` lie inside.
struct KeyRange {
  int low, high, wanted, count;
};

// 512 disjoint groups have a key each that is at least the smallest of their maxima, so as many are above it.
template <int kKeys>
__device__ __forceinline__ KeyRange bracket(const RowKeys<kKeys>& keys, int wanted,
                                            SelectShared<kKeys>& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int largest[2] = {-1, -1};
  keys.each([&](int i, int key) { largest[i % 2] = max(largest[i % 2], key); });
  const int least = __reduce_min_sync(device::kFullMask, min(largest[0], largest[1]));
  const int most = __reduce_max_sync(device::kFullMask, max(largest[0], largest[1]));
  if (lane == 0) {
    shared.least[warp] = least;
    shared.most[warp] = most;
  }
  __syncthreads();
  KeyRange range;
  range.low = max(__reduce_min_sync(device::kFullMask, shared.least[lane % kSelectWarps]), 0);
  range.high = __reduce_max_sync(device::kFullMask, shared.most[lane % kSelectWarps]);
  if (wanted > 2 * kSelectThreads) {
    range.low = 0;
  }
  range.wanted = wanted;
  range.count = 0;
  return range;
}

__device__ __forceinline__ void clear_bins(uint32_t* bins) {
  static_assert(kSelectBins == 8 * kSelectThreads);
  reinterpret_cast<uint4*>(bins)[threadIdx.x] = make_uint4(0, 0, 0, 0);
  reinterpret_cast<uint4*>(bins)[threadIdx.x + kSelectThreads] = make_uint4(0, 0, 0, 0);
}

// Narrows `range` to the bin of its `wanted`-th largest key, `bins` being clear. Returns whether a bin is one
// key.
template <int kKeys>
__device__ __forceinline__ bool narrow(const RowKeys<kKeys>& keys, KeyRange& range,
                                       SelectShared<kKeys>& shared) {
  const uint32_t width = static_cast<uint32_t>(range.high - range.low);
  const int shift = max(0, 21 - __clz(width));
  const uint32_t bins = device::shared_address(shared.bins);
  const auto count = [&](uint32_t bin) {
    asm volatile("red.shared.add.u32 [%0], 1;" ::"r"(bins + bin * 4) : "memory");
  };
  if (shift > 0) {
    // below the range the difference wraps; above there is nothing, or the range is a power of two
    keys.each([&](int, int key) {
      count(min(static_cast<uint32_t>(key - range.low) >> shift, uint32_t{kSelectBins}));
    });
  } else {
    keys.each([&](int, int key) {
      const uint32_t bin = static_cast<uint32_t>(key - range.low);
      count(bin <= width ? bin : uint32_t{kSelectBins});
    });
  }
  __syncthreads();
  // thread i owns 8 bins, the largest keys first
  const int first = kSelectBins - 8 - static_cast<int>(threadIdx.x) * 8;
  const uint4 lower = *reinterpret_cast<const uint4*>(shared.bins + first);
  const uint4 upper = *reinterpret_cast<const uint4*>(shared.bins + first + 4);
  const int counts[8] = {static_cast<int>(upper.w), static_cast<int>(upper.z), static_cast<int>(upper.y),
                         static_cast<int>(upper.x), static_cast<int>(lower.w), static_cast<int>(lower.z),
                         static_cast<int>(lower.y), static_cast<int>(lower.x)};
  int own = 0, total;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    own += counts[i];
  }
  int above = sum_before(own, shared.scan[0], &total);
  if (above < range.wanted && range.wanted <= above + own) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (above < range.wanted && range.wanted <= above + counts[i]) {
        shared.bin = first + 7 - i;
        shared.bin_above = above;
        shared.bin_count = counts[i];
      }
      above += counts[i];
    }
  }
  __syncthreads();
  range.count = shared.bin_count;
  range.wanted -= shared.bin_above;
  range.low += shared.bin << shift;
  range.high = static_cast<int>(
      min(static_cast<uint32_t>(range.high), static_cast<uint32_t>(range.low) + ((1u << shift) - 1)));
  return shift == 0;
}

}  // namespace htree::tree_attention
