// What the kernels of a walk share: the description of a row, its candidates in a layer, its lists, and where
// the pages keep their rows.
#pragma once

#include "device/numeric.cuh"
#include "ops/tree_cache/tree_cache_params.h"

namespace htree::tree_cache {

// A row (query, head) of the chunk, as every kernel of the walk sees it.
struct WalkRow {
  QueryRow query;
  int64_t row;  // in the call
  int64_t at;   // (row - chunk.first) * H_kv + head
  int head;
};

template <typename T>
__device__ __forceinline__ WalkRow walk_row(const AttendParams<T>& params, int64_t block) {
  WalkRow walk;
  const int64_t in_chunk = block / params.layout.num_kv_heads;
  walk.row = params.chunk.first + in_chunk;
  walk.at = block;
  walk.head = static_cast<int>(block - in_chunk * params.layout.num_kv_heads);
  walk.query = params.chunk.rows[walk.row];
  return walk;
}

// Whether the row is computed at all.
__device__ __forceinline__ bool counts(const QueryRow& query) {
  return query.token >= 0 && query.leader != kNoLists;
}

// The number of candidates of the row in a layer, layer <= top. All lists below the top are as long as their candidates
// allow, so the number follows from the token alone. docs/semantics/tree_attention.md §1.3
__device__ __forceinline__ int num_candidates(const PageLayout& layout, const QueryRow& query, int top_k,
                                              int layer) {
  const uint32_t token = static_cast<uint32_t>(query.token), most = static_cast<uint32_t>(top_k);
  const uint32_t tops = token / layout.tokens[query.top];
  uint32_t num = tops + 1;
  // The loop has its end in its head: with a return in its body nvcc 13.0 left the end out in some kernels.
  for (int l = query.top - 1; l >= layer; --l) {
    num = (min(num, most) - 1) * layout.rate + token / layout.tokens[l] % layout.rate + 1;
  }
  return static_cast<int>(num);
}

// Whether a layer adds to the softmax. If not, every candidate is opened.
__device__ __forceinline__ bool merges(int layer, int num, int top_k) {
  return layer == 0 || num > top_k;
}

// The list that the row uses at a layer, which is its leader's. [top_k]
template <typename T>
__device__ __forceinline__ const int32_t* list_of(const AttendParams<T>& params, const WalkRow& walk,
                                                  int layer) {
  const CacheSequences& sequences = params.sequences;
  const RowChunk& chunk = params.chunk;
  const int64_t layers = params.layout.num_layers, heads = params.layout.num_kv_heads;
  const int32_t leader = walk.query.leader;
  const int32_t* lists = chunk.lists;
  int64_t row = leader - chunk.first;
  if (leader >= kFromRing) {
    lists = sequences.lists;
    row = static_cast<int64_t>(walk.query.sequence) * sequences.ring + (leader - kFromRing);
  } else if (row < 0) {
    lists = chunk.previous_lists;
    row = leader - chunk.previous;
  }
  return lists + ((row * layers + layer) * heads + walk.head) * params.options.top_k;
}

// The same, but null at a top of which no list tells: there all nodes up to the row's own are candidates.
template <typename T>
__device__ __forceinline__ const int32_t* list_or_null(const AttendParams<T>& params, const WalkRow& walk,
                                                       int layer) {
  return params.options.open_top && layer >= walk.query.top ? nullptr : list_of(params, walk, layer);
}

// The list that a leader writes. [top_k]
template <typename T>
__device__ __forceinline__ int32_t* own_list(const AttendParams<T>& params, const WalkRow& walk, int layer) {
  const int64_t layers = params.layout.num_layers, heads = params.layout.num_kv_heads;
  return params.chunk.lists +
         (((walk.row - params.chunk.first) * layers + layer) * heads + walk.head) * params.options.top_k;
}

// First element of a place's row in its pool, or -1 where its page is none.
template <typename T>
__device__ __forceinline__ int64_t row_at(const AttendParams<T>& params, const WalkRow& walk,
                                          const Place& place, int64_t page_rows, int width) {
  const PageLayout& layout = params.layout;
  if (place.page >= layout.max_pages) {
    return -1;
  }
  const uint32_t page = static_cast<uint32_t>(
      params.sequences
          .block_table[static_cast<int64_t>(walk.query.sequence) * layout.max_pages + place.page]);
  return page < layout.num_pages
             ? ((int64_t{page} * layout.num_kv_heads + walk.head) * page_rows + place.row) * width
             : -1;
}

// The same of a node, and -1 where the node is none or starts behind the row's token.
template <typename T>
__device__ __forceinline__ int64_t row_of(const AttendParams<T>& params, const WalkRow& walk, int layer,
                                          int64_t node, int64_t page_rows, int width) {
  const uint32_t rightmost = static_cast<uint32_t>(walk.query.token) / params.layout.tokens[layer];
  if (node < 0 || node > static_cast<int64_t>(rightmost)) {
    return -1;
  }
  const Place place = params.layout.node(static_cast<uint32_t>(layer), static_cast<uint32_t>(node));
  return row_at(params, walk, place, page_rows, width);
}

// The node that candidate p of a list is.
__device__ __forceinline__ int64_t node_of(const int32_t* parents, uint32_t p, uint32_t rate) {
  const uint32_t slot = p / rate;
  return int64_t{parents[slot]} * rate + (p - slot * rate);
}

// The candidate that a node is, where its parent is one of the first `slots` of an ascending list; else a
// number below every candidate.
__device__ __forceinline__ int candidate_of(const int32_t* parents, int slots, int32_t node, int32_t rate) {
  const int32_t parent = node / rate;
  int low = 0, high = slots;  // search for the last parent that is not behind the node's parent
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (parents[middle] <= parent) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return parents[low] == parent ? low * rate + node % rate : -1;
}

}  // namespace htree::tree_cache
