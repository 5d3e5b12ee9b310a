// The masks of parent lists and the inverse of the lists, for every r. No torch.
#include "host/cuda/kernel_launch.h"
#include "ops/sparse_attention/cuda/any/inverted_lists.h"
#include "ops/tree/cuda/sm80/gather.cuh"

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
  const int count = list ? count_entries(list, p.width) : static_cast<int>(rightmost / p.rate) + 1;
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

// The inverse is a counting sort that keeps the order of the lists. Lists are cut into runs of kInvertedListRows.
// Each run counts its parents, scans give every (run, parent) its place, and each run fills its places list
// after list. A list holds a parent at most once.
constexpr int kInvertedListThreads = 256;

// Most counters that a block keeps in shared memory. More than these stay in device memory.
constexpr int64_t kSharedCounters = 24 * 1024;

// Calls f(list row, slot, parent) for the entries of a run that name a parent; kOrdered puts a barrier after
// every list. A list is read while f works on the one before it. Grid: x = runs, y = batch * kv head.
template <bool kOrdered, typename F>
__device__ __forceinline__ void for_each_entry(const InvertedListParams& p, F&& f) {
  constexpr int kAhead = 4;
  const int batch = blockIdx.y / p.num_kv_heads, kv_head = blockIdx.y % p.num_kv_heads;
  const int begin = blockIdx.x * kInvertedListRows, end = min(begin + kInvertedListRows, p.num_lists);
  const auto read = [&](int row, int slot) {
    return row < end && slot < p.width
               ? p.lists[batch * p.list_batch + (int64_t{row} * p.num_kv_heads + kv_head) * p.width + slot]
               : -1;
  };
  const auto use = [&](int row, int slot, int parent) {
    if (parent >= 0 && parent < p.num_parents) {
      f(row, slot, parent);
    }
  };
  int ahead[kAhead];
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    ahead[i] = read(begin, threadIdx.x + i * kInvertedListThreads);
  }
  for (int row = begin; row < end; ++row) {
    int parents[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      parents[i] = ahead[i];
      ahead[i] = read(row + 1, threadIdx.x + i * kInvertedListThreads);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      use(row, threadIdx.x + i * kInvertedListThreads, parents[i]);
    }
    for (int slot = threadIdx.x + kAhead * kInvertedListThreads; slot < p.width;
         slot += kInvertedListThreads) {
      use(row, slot, read(row, slot));
    }
    if constexpr (kOrdered) {
      __syncthreads();
    }
  }
}

__device__ __forceinline__ uint32_t* run_counts(const InvertedListParams& p) {
  return p.run_counts + (int64_t{blockIdx.y} * gridDim.x + blockIdx.x) * p.num_parents;
}

// Shared memory: num_parents counters, if kShared.
template <bool kShared>
__global__ void __launch_bounds__(kInvertedListThreads) inverted_list_count_kernel(InvertedListParams p) {
  extern __shared__ uint32_t shared_counts[];
  uint32_t* counts = run_counts(p);
  const auto clear = [&](uint32_t* to) {
    for (int64_t i = threadIdx.x; i < p.num_parents; i += kInvertedListThreads) {
      to[i] = 0;
    }
  };
  if constexpr (kShared) {
    clear(shared_counts);
    __syncthreads();
    for_each_entry<false>(p, [&](int, int, int parent) { atomicAdd(&shared_counts[parent], 1u); });
    __syncthreads();
    for (int64_t i = threadIdx.x; i < p.num_parents; i += kInvertedListThreads) {
      counts[i] = shared_counts[i];
    }
  } else {
    clear(counts);
    __syncthreads();
    for_each_entry<false>(p, [&](int, int, int parent) { atomicAdd(&counts[parent], 1u); });
  }
}

// Replaces the counts of a parent by its places in every run, counted from 0, and leaves their total at its
// offset.
// Grid: x = runs of kInvertedListThreads parents, y = batch * kv head.
__global__ void __launch_bounds__(kInvertedListThreads)
    inverted_list_places_kernel(InvertedListParams p, int num_runs) {
  const int64_t parent = int64_t{blockIdx.x} * kInvertedListThreads + threadIdx.x;
  if (parent >= p.num_parents) {
    return;
  }
  uint32_t* counts = p.run_counts + int64_t{blockIdx.y} * num_runs * p.num_parents + parent;
  uint32_t place = 0;
  for (int run = 0; run < num_runs; ++run) {
    const uint32_t here = counts[run * p.num_parents];
    counts[run * p.num_parents] = place;
    place += here;
  }
  p.offsets[blockIdx.y * (p.num_parents + 1) + parent] = place;
}

// Replaces the totals of a head's parents by offsets. The entries of a head start at head * num_lists *
// width. Grid: x = batch * kv head.
__global__ void __launch_bounds__(kInvertedListThreads) inverted_list_scan_kernel(InvertedListParams p) {
  __shared__ uint32_t warp_totals[kInvertedListThreads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t head = blockIdx.x;
  uint32_t* offsets = p.offsets + head * (p.num_parents + 1);
  uint32_t base = static_cast<uint32_t>(head * p.num_lists * p.width);
  for (int64_t first = 0; first < p.num_parents; first += kInvertedListThreads) {
    const int64_t parent = first + threadIdx.x;
    const uint32_t own = parent < p.num_parents ? offsets[parent] : 0;
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
    for (int i = 0; i < kInvertedListThreads / 32; ++i) {
      before += i < warp ? warp_totals[i] : 0;
      base += warp_totals[i];
    }
    __syncthreads();
    if (parent < p.num_parents) {
      offsets[parent] = before;
    }
  }
  if (threadIdx.x == 0) {
    offsets[p.num_parents] = base;
  }
}

template <bool kShared>
__global__ void __launch_bounds__(kInvertedListThreads) inverted_list_fill_kernel(InvertedListParams p) {
  extern __shared__ uint32_t shared_counts[];
  uint32_t* places = run_counts(p);
  const uint32_t* offsets = p.offsets + blockIdx.y * (p.num_parents + 1);
  if constexpr (kShared) {
    for (int64_t i = threadIdx.x; i < p.num_parents; i += kInvertedListThreads) {
      shared_counts[i] = offsets[i] + places[i];
    }
    __syncthreads();
    for_each_entry<true>(p, [&](int row, int slot, int parent) {
      p.entries[atomicAdd(&shared_counts[parent], 1u)] = static_cast<uint32_t>(row) * p.width + slot;
    });
  } else {
    for_each_entry<true>(p, [&](int row, int slot, int parent) {
      p.entries[offsets[parent] + atomicAdd(&places[parent], 1u)] =
          static_cast<uint32_t>(row) * p.width + slot;
    });
  }
}

cudaError_t launch_list_masks(const ListMaskParams& params, cudaStream_t stream) {
  const int64_t rows = int64_t{params.num_batches} * params.num_lists * params.num_kv_heads;
  const int64_t bytes = kMaskWarps * params.mask_words * 4;
  const LaunchShape shape{.grid = static_cast<unsigned>(ceil_div(rows, kMaskWarps)),
                          .threads = kMaskWarps * 32,
                          .shared_bytes = bytes};
  return launch_kernel(list_masks_kernel, shape, stream, params);
}

cudaError_t launch_inverted_lists(const InvertedListParams& params, cudaStream_t stream) {
  const unsigned heads = static_cast<unsigned>(params.num_batches * params.num_kv_heads);
  const dim3 runs(static_cast<unsigned>(ceil_div(params.num_lists, kInvertedListRows)), heads);
  const bool shared = params.num_parents <= kSharedCounters;
  const int64_t bytes = shared ? params.num_parents * 4 : 0;
  const auto count = shared ? inverted_list_count_kernel<true> : inverted_list_count_kernel<false>;
  const auto fill = shared ? inverted_list_fill_kernel<true> : inverted_list_fill_kernel<false>;
  const LaunchShape per_run{.grid = runs, .threads = kInvertedListThreads, .shared_bytes = bytes};
  const dim3 parents(static_cast<unsigned>(ceil_div(params.num_parents, kInvertedListThreads)), heads);
  cudaError_t error = launch_kernel(count, per_run, stream, params);
  if (error == cudaSuccess) {
    error = launch_kernel(inverted_list_places_kernel, {.grid = parents, .threads = kInvertedListThreads},
                          stream, params, static_cast<int>(runs.x));
  }
  if (error == cudaSuccess) {
    error = launch_kernel(inverted_list_scan_kernel, {.grid = heads, .threads = kInvertedListThreads}, stream,
                          params);
  }
  return error == cudaSuccess ? launch_kernel(fill, per_run, stream, params) : error;
}

}  // namespace htree::tree_attention
