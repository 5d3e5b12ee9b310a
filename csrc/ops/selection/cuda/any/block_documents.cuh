// Where the sequences of a chunk lie, and which leaders a tile has of each.
#pragma once

#include "ops/selection/cuda/any/block_params.h"

namespace htree::tree_attention {

// The last document whose leaders begin at or before `slot`: that of the leader, or one without leaders at the end.
__device__ __forceinline__ int find_document(const BlockChunk& chunk, int32_t slot) {
  int low = 0, high = chunk.num_documents - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (chunk.documents[middle].first_slot <= slot) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// Leaders [begin, end) of a document.
struct LeaderRange {
  int32_t begin, end;
  __device__ __forceinline__ bool is_empty() const { return begin >= end; }
};

// Those among slots [first, last).
__device__ __forceinline__ LeaderRange leaders_among(const BlockDocument& document, int32_t first,
                                                     int32_t last) {
  return {max(first - document.first_slot, 0), min(last - document.first_slot, document.num_leaders)};
}

__device__ __forceinline__ int32_t diagonal_block(const BlockChunk& chunk, const BlockDocument& document,
                                                  int32_t leader) {
  return (document.first_token + leader * chunk.stride) / chunk.block_size;
}

// The row of scores of a slot in a head of the chunk, and that of the tiles.
__device__ __forceinline__ int64_t row_number(const BlockChunk& chunk, int32_t head, int32_t slot) {
  return static_cast<int64_t>(head) * chunk.num_slots + (slot - chunk.first_slot);
}
__device__ __forceinline__ float* score_row(const BlockChunk& chunk, int32_t head, int32_t slot) {
  return chunk.scores + row_number(chunk, head, slot) * chunk.row;
}
__device__ __forceinline__ float* tile_scores(const BlockChunk& chunk, int32_t head, int32_t slot) {
  return chunk.tiles == nullptr ? nullptr : chunk.tiles + row_number(chunk, head, slot) * tile_row(chunk.row);
}

}  // namespace htree::tree_attention
