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

constexpr int kInverseThreads = 256;

// Key of an entry: (batch * H_kv + kv head) * num_parents + parent; the largest for what is no parent.
__global__ void __launch_bounds__(kInverseThreads)
    inverse_keys_kernel(InverseParams p, uint32_t* keys, uint32_t* values) {
  const int64_t i = int64_t{blockIdx.x} * kInverseThreads + threadIdx.x;
  if (i >= p.num_entries()) {
    return;
  }
  const int64_t slot = i % p.width;
  const int64_t kv_head = i / p.width % p.num_kv_heads;
  const int64_t list_row = i / p.width / p.num_kv_heads % p.num_lists;
  const int64_t batch = i / p.width / p.num_kv_heads / p.num_lists;
  const int64_t parent = p.lists[batch * p.list_batch + (list_row * p.num_kv_heads + kv_head) * p.width + slot];
  const bool exists = parent >= 0 && parent < p.num_parents;
  keys[i] = static_cast<uint32_t>(exists ? (batch * p.num_kv_heads + kv_head) * p.num_parents + parent : p.num_keys());
  values[i] = static_cast<uint32_t>(list_row * p.width + slot);
}

// offsets[x] = first entry whose key is >= x, from the sorted keys.
__global__ void __launch_bounds__(kInverseThreads)
    inverse_offsets_kernel(const uint32_t* keys, int64_t num_entries, int64_t num_keys, uint32_t* offsets) {
  const int64_t i = int64_t{blockIdx.x} * kInverseThreads + threadIdx.x;
  if (i > num_entries) {
    return;
  }
  const int64_t before = i == 0 ? int64_t{-1} : static_cast<int64_t>(keys[i - 1]);
  const int64_t here = i == num_entries ? num_keys : static_cast<int64_t>(keys[i]);
  for (int64_t key = before + 1; key <= here && key <= num_keys; ++key) {
    offsets[key] = static_cast<uint32_t>(i);
  }
}

}  // namespace htree::tree_attention
