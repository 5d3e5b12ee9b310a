// Which tokens and heads a block of the decode kernel works on, and where their rows are.
#pragma once

#include <cstdint>

#include "ops/compressed_kv/decode/decode_params.h"

namespace htree::compressed_kv {

// What a block works on.
struct Split {
  int index;
  int sequence;
  int kv_head;
  int first_head;  // query head, counted over the batch
  int num_heads;   // at most kHeadsPerBlock
  int64_t begin;   // tokens [begin, end); begin is a multiple of 16
  int64_t end;
};

__device__ __forceinline__ Split split_of(const DecodeParams& p, int heads_per_kv) {
  Split s;
  // Quotients are a long chain of instructions, which nothing hides here.
  const auto launched = static_cast<unsigned>(p.splits.launched);
  const unsigned sequence = launched == 1 ? blockIdx.x : blockIdx.x / launched;
  s.sequence = static_cast<int>(sequence);
  s.index = static_cast<int>(blockIdx.x - sequence * launched);
  s.kv_head = static_cast<int>(blockIdx.y);
  const int chunk = static_cast<int>(blockIdx.z);
  s.first_head = s.sequence * p.heads.query + s.kv_head * heads_per_kv + chunk * kHeadsPerBlock;
  s.num_heads = min(kHeadsPerBlock, heads_per_kv - chunk * kHeadsPerBlock);
  int64_t length = p.capacity;
  if (p.tables.comp_len != nullptr) {
    length = min(length, static_cast<int64_t>(max(p.tables.comp_len[s.sequence], 0)));
  }
  s.begin = min(s.index * p.split_size, length);
  s.end = min(s.begin + p.split_size, length);
  return s;
}

// Where the rows of a split begin. Tiles count from there; with a block table they count from the start of
// the tensors, because pages hold whole tiles.
__device__ __forceinline__ int64_t first_row_of(const DecodeParams& p, const Split& s) {
  return p.tables.block_table != nullptr
             ? 0
             : (static_cast<int64_t>(s.sequence) * p.heads.kv + s.kv_head) * p.capacity + s.begin;
}
inline __device__ __noinline__ uint32_t paged_tile(const DecodeParams& p, int sequence, int kv_head,
                                                   int64_t token) {
  const int in_sequence = static_cast<int>(token / p.pages.tokens);
  const int page = p.tables.block_table[static_cast<int64_t>(sequence) * p.pages.per_sequence + in_sequence];
  const int64_t known = min(max(page, 0), p.pages.all - 1);  // a wrong page must not be an illegal address
  return static_cast<uint32_t>(((known * p.heads.kv + kv_head) * p.pages.tokens + token % p.pages.tokens) /
                               kTileRows);
}
// Where tile `tile` of the split is stored.
__device__ __forceinline__ uint32_t stored_tile(const DecodeParams& p, const Split& s, int tile) {
  return p.tables.block_table == nullptr ? tile
                                         : paged_tile(p, s.sequence, s.kv_head, s.begin + tile * kTileRows);
}

}  // namespace htree::compressed_kv
