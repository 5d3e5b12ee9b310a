// Masks and inverse of parent lists, for every r.
#pragma once

#include "ops/tree_attention/attention/gradient_launch.h"
#include "ops/tree_attention/attention/parent_stream.cuh"

namespace htree::tree_attention {

constexpr int kMaskWarps = 4;

// Position of `parent` in the ascending list of `count` parents, or -1.
__device__ __forceinline__ int find_slot(const int32_t* list, int count, int64_t parent) {
  int low = 0, high = count;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (list[middle] < parent) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low < count && list[low] == parent ? low : -1;
}

// One warp per (batch, list row, kv head). Shared memory: kMaskWarps * mask_words words.
__global__ void __launch_bounds__(kMaskWarps * 32) list_masks_kernel(ListMaskParams p) {
  extern __shared__ uint32_t mask_words[];
  const int lane = threadIdx.x % 32;
  const int64_t row_idx = int64_t{blockIdx.x} * kMaskWarps + threadIdx.x / 32;
  if (row_idx >= int64_t{p.num_batches} * p.num_lists * p.num_kv_heads) {
    return;
  }
  const int64_t in_batch = row_idx % (int64_t{p.num_lists} * p.num_kv_heads);
  const int64_t batch = row_idx / (int64_t{p.num_lists} * p.num_kv_heads);
  const int64_t rightmost = (p.t0 + in_batch / p.num_kv_heads * p.stride) / p.node_span;
  const int32_t* list = p.lists ? p.lists + batch * p.list_batch + in_batch * p.width : nullptr;
  const int count = list ? count_parents(list, p.width) : static_cast<int>(rightmost / p.rate) + 1;
  if (lane == 0) {
    p.counts[row_idx] = count;
  }
  if (!p.next_lists) {
    return;
  }
  uint32_t* words = mask_words + threadIdx.x / 32 * p.mask_words;
  for (int64_t i = lane; i < p.mask_words; i += 32) {
    words[i] = 0;
  }
  __syncwarp();
  const int32_t* next = p.next_lists + batch * p.next_batch + in_batch * p.width;
  for (int i = lane; i < p.width; i += 32) {
    const int64_t node = next[i];
    if (node < 0) {
      continue;
    }
    const int64_t parent = node / p.rate;
    const int64_t slot = !list ? (parent < count ? parent : -1) : find_slot(list, count, parent);
    if (slot >= 0) {
      const int64_t candidate = slot * p.rate + node % p.rate;
      if (candidate / 32 < p.mask_words) {
        atomicOr(&words[candidate / 32], 1u << (candidate % 32));
      }
    }
  }
  __syncwarp();
  uint32_t* out = p.selected + row_idx * p.mask_words;
  for (int64_t i = lane; i < p.mask_words; i += 32) {
    out[i] = words[i];
  }
}

// The inverse is a counting sort that keeps the order of the lists: runs of kInverseRows list rows count
// their parents, a scan gives every (run, parent) its place, and each run fills its places row after row. A
// row holds a parent once.
constexpr int kInverseThreads = 256;

// Grid: x = runs, y = batch * kv head. Calls f(list row, slot, parent) for the entries of the run that name a
// parent, with a barrier after every row when kOrdered.
template <bool kOrdered, typename F>
__device__ __forceinline__ void for_each_entry(const InverseParams& p, F&& f) {
  const int batch = blockIdx.y / p.num_kv_heads, kv_head = blockIdx.y % p.num_kv_heads;
  const int begin = blockIdx.x * kInverseRows, end = min(begin + kInverseRows, p.num_lists);
  for (int row = begin; row < end; ++row) {
    const int32_t* list =
        p.lists + batch * p.list_batch + (int64_t{row} * p.num_kv_heads + kv_head) * p.width;
    for (int slot = threadIdx.x; slot < p.width; slot += kInverseThreads) {
      const int parent = list[slot];
      if (parent >= 0 && parent < p.num_parents) {
        f(row, slot, parent);
      }
    }
    if constexpr (kOrdered) {
      __syncthreads();
    }
  }
}

__device__ __forceinline__ uint32_t* run_counts(const InverseParams& p) {
  return p.run_counts + (int64_t{blockIdx.y} * gridDim.x + blockIdx.x) * p.num_parents;
}

__global__ void __launch_bounds__(kInverseThreads) inverse_count_kernel(InverseParams p) {
  uint32_t* counts = run_counts(p);
  for (int64_t i = threadIdx.x; i < p.num_parents; i += kInverseThreads) {
    counts[i] = 0;
  }
  __syncthreads();
  for_each_entry<false>(p, [&](int, int, int parent) { atomicAdd(&counts[parent], 1u); });
}

// Turns counts into first places and writes the offsets of a head, whose entries start at head * num_lists *
// width. Grid: x = batch * kv head.
__global__ void __launch_bounds__(kInverseThreads) inverse_scan_kernel(InverseParams p, int num_runs) {
  __shared__ uint32_t warp_totals[kInverseThreads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t head = blockIdx.x;
  uint32_t* counts = p.run_counts + head * num_runs * p.num_parents;
  uint32_t* offsets = p.offsets + head * (p.num_parents + 1);
  uint32_t base = static_cast<uint32_t>(head * p.num_lists * p.width);
  for (int64_t first = 0; first < p.num_parents; first += kInverseThreads) {
    const int64_t parent = first + threadIdx.x;
    uint32_t own = 0;
    for (int run = 0; run < num_runs && parent < p.num_parents; ++run) {
      own += counts[run * p.num_parents + parent];
    }
    uint32_t inclusive = own;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const uint32_t other = __shfl_up_sync(device::kFullMask, inclusive, offset);
      inclusive += lane >= offset ? other : 0;
    }
    if (lane == 31) {
      warp_totals[warp] = inclusive;
    }
    __syncthreads();
    uint32_t before = base + inclusive - own;
#pragma unroll
    for (int i = 0; i < kInverseThreads / 32; ++i) {
      before += i < warp ? warp_totals[i] : 0;
      base += warp_totals[i];
    }
    __syncthreads();
    if (parent < p.num_parents) {
      offsets[parent] = before;
      for (int run = 0; run < num_runs; ++run) {
        const uint32_t here = counts[run * p.num_parents + parent];
        counts[run * p.num_parents + parent] = before;
        before += here;
      }
    }
  }
  if (threadIdx.x == 0) {
    offsets[p.num_parents] = base;
  }
}

__global__ void __launch_bounds__(kInverseThreads) inverse_fill_kernel(InverseParams p) {
  uint32_t* places = run_counts(p);
  for_each_entry<true>(p, [&](int row, int slot, int parent) {
    p.entries[atomicAdd(&places[parent], 1u)] = static_cast<uint32_t>(row) * p.width + slot;
  });
}

}  // namespace htree::tree_attention
