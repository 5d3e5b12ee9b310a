// Which of a caller's lists belong to rows in masked tiles: visible_lists.h writes those so that kernels which gather take
// them for empty ones.
#pragma once

#include "ops/sparse_attention/cuda/any/visible_lists.h"
#include "ops/tree/cuda/sm80/gather.cuh"

namespace htree::tree_attention {

// The parent of an entry of a masked list, negative where the list ends. Lists of a tree are as they are; a caller's list
// that is gathered has no such parent.
__device__ __forceinline__ int masked_parent(const GatherParams& p, int32_t entry) {
  return p.list_sizes ? masked_entry(entry) : entry;  // its own inverse
}

// Whether a query that stands before the bound of masked rows is one of them.
__device__ __forceinline__ bool is_masked_row(const GatherParams& p, int batch, int kv_head, int64_t query) {
  return !p.list_sizes ||
         masked_parent(
             p,
             p.lists[batch * p.list_batch + (list_of(p, query) * p.num_kv_heads + kv_head) * p.list_width]) >=
             0;
}

// Whether all of the queries, one for each warp below `warps`, are masked rows, of which `head` is batch * kv head. Every
// thread of the block calls.
__device__ __forceinline__ bool all_masked_rows(const GatherParams& p, int head, int64_t query, int warps) {
  const bool gathers = static_cast<int>(threadIdx.x) / 32 < warps &&
                       !is_masked_row(p, head / p.num_kv_heads, head % p.num_kv_heads, query);
  return !__syncthreads_or(gathers);
}

}  // namespace htree::tree_attention
