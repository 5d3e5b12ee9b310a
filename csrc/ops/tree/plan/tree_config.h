// How a call uses its tree on CUDA: which rows walk it, which see tokens as dense tiles, and what the copies of its layers
// take in memory. Pure functions. No CUDA and no torch.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ops/tree/plan/problem.h"

namespace htree::tree_attention {

enum class AttentionPath {
  kGeneral,  // staged kernels over chunks, every dtype and shape
  // r = 16, fp16 or bf16, K = V in {32, 64, 128}, G <= 16, k <= 1024: mma.sync from sm_80 on,
  // and wgmma on sm_90
  kTensorCore,
};

// What forward and backward both need to know.
struct TreeConfig {
  AttentionPath path = AttentionPath::kGeneral;
  bool dense_top = false;  // the top layer as dense products of warpgroups (sm_90a), see forward/dense_top/
  // The rows before this token of the sequence are dense causal attention (sm_90a), see forward/dense_rows/ and
  // backward/dense_rows/. The others walk the tree.
  int64_t dense_rows = 0;
  // The rows from there to this token walk the tree and multiply, at the tokens, whole tiles under the bits of their
  // lists (sm_90a), see forward/masked_rows/ and backward/masked_rows/. Where this is not 0, rows that gather tokens come
  // last, and the packed copy of the tokens takes the place of the tiles.
  int64_t masked_rows = 0;
  // Which tables of rotations the kernels read, see RotationOrder.
  bool fragment_rotations = false;
  bool dim_rotations = false;
  int64_t batch_chunk = 1;      // batches of a chunk
  int64_t query_chunk = 0;      // queries of a chunk, a multiple of the stride
  int64_t selection_chunk = 0;  // lists whose scores are in memory at the same time
  int64_t top_chunk = 0;        // lists whose importances at a dense top are in memory at the same time
};

// The queries of a piece that stand before token `end`.
inline int64_t queries_before(const Piece& piece, int64_t end) {
  return std::clamp<int64_t>(end - piece.start, 0, piece.queries);
}
// The queries of a piece that are dense rows; they come first.
inline int64_t dense_queries(const Piece& piece, const TreeConfig& config) {
  return queries_before(piece, config.dense_rows);
}
// The most queries of a piece that walk the tree. A call without any needs no packed layers.
inline int64_t walking_queries(const AttentionProblem& p, const TreeConfig& config) {
  int64_t most = 0;
  for (const Piece& piece : p.pieces()) {
    most = std::max(most, piece.queries - dense_queries(piece, config));
  }
  return most;
}
inline bool walks(const AttentionProblem& p, const TreeConfig& config) {
  return walking_queries(p, config) > 0;
}
// Whether some row gathers tokens. A call without any needs no packed copy of them.
inline bool gathers_tokens(const AttentionProblem& p, const TreeConfig& config) {
  const int64_t end = std::max(config.dense_rows, config.masked_rows);
  for (const Piece& piece : p.pieces()) {
    if (queries_before(piece, end) < piece.queries) {
      return true;
    }
  }
  return false;
}
// The tokens that the dense and the masked rows of a call see: those that are laid out as tiles.
inline int64_t tiled_tokens(const AttentionProblem& p, const TreeConfig& config) {
  const int64_t end = std::max(config.dense_rows, config.masked_rows);
  int64_t tokens = 0;
  for (const Piece& piece : p.pieces()) {
    if (const int64_t queries = queries_before(piece, end); queries > 0) {
      tokens = std::max(tokens, piece.start + queries);
    }
  }
  return tokens;
}

// The packed copy of a layer, see packed_layer.cuh.
inline int64_t packed_layer_bytes(const AttentionProblem& p, int64_t layer) {
  return p.batch * p.num_kv_heads * p.parents(layer) * packed_parent_bytes(p.key_dim, p.value_dim);
}
// A copy of `rows` keys and values per K/V head in tiles, with scales and flags, see dense_layer.cuh.
inline int64_t dense_layer_bytes(const AttentionProblem& p, int64_t rows) {
  return p.batch * p.num_kv_heads *
         (ceil_div(rows, kDenseTileNodes) *
          (dense_tile_bytes(p.key_dim) + dense_tile_bytes(p.value_dim) + kDenseTileNodes * 4 + 4));
}

}  // namespace htree::tree_attention
