// How select_blocks divides a call on the CPU, so that what it holds beside its arguments is bounded at any length. Pure
// functions. No torch.
#pragma once

#include <algorithm>

#include "ops/selection/block_options.h"

namespace htree::tree_attention {

// Packed keys stay in the outer cache of a server, block scores in an inner one.
constexpr int64_t kPackedKeyBytes = int64_t{64} << 20;
constexpr int64_t kBlockScoreBytes = int64_t{16} << 20;

struct BlockChunks {
  int64_t groups;   // groups of blocks of a head
  int64_t heads;    // heads of sequences whose keys are packed at once
  int64_t segment;  // groups packed at once
  int64_t
      tokens;  // tokens of a block packed at once: block_size, or fewer where one group of blocks is too large
  int64_t rows;  // queries whose scores are held at once, of each of the `heads`
  int64_t row_elements(int64_t width) const { return groups * width; }
};

// `num_heads` heads of sequences, each with `num_blocks` blocks to score and `leaders` queries. A group has `width` blocks,
// a tile `tile` queries; numbers have `size` bytes.
inline BlockChunks block_chunks(int64_t num_heads, int64_t num_blocks, int64_t leaders, int64_t block_size,
                                int64_t d, int64_t width, int64_t tile, int64_t size) {
  BlockChunks chunks{};
  chunks.groups = ceil_div(num_blocks, width);
  const int64_t token_bytes = d * width * size;
  chunks.tokens = std::clamp<int64_t>(kPackedKeyBytes / token_bytes, 1, block_size);
  chunks.segment = std::clamp<int64_t>(kPackedKeyBytes / (token_bytes * chunks.tokens), 1,
                                       std::max<int64_t>(chunks.groups, 1));
  const bool whole = chunks.tokens == block_size && chunks.segment >= chunks.groups;
  const int64_t head_bytes = chunks.segment * block_size * token_bytes;
  chunks.heads =
      whole ? std::clamp<int64_t>(kPackedKeyBytes / head_bytes, 1, std::max<int64_t>(num_heads, 1)) : 1;
  const int64_t row_bytes = std::max<int64_t>(1, chunks.heads * chunks.row_elements(width) * size);
  const int64_t tiles = std::max<int64_t>(1, kBlockScoreBytes / (row_bytes * tile));
  chunks.rows = std::min(tiles, ceil_div(std::max<int64_t>(leaders, 1), tile)) * tile;
  return chunks;
}

}  // namespace htree::tree_attention
