// Sizes of the dense rows, the queries before `max_top_nodes`: docs/semantics/tree_attention.md §1.5, and of the masked
// rows behind them, which run on the same kernel. No CUDA and no torch.
#pragma once

#include "ops/tree/plan/problem.h"

namespace htree::tree_attention {

// The rows of a thread block: all G query heads of a run of tokens.
constexpr int kRunRows = 128;
// log2 of the tokens of a run: the most whole tokens of G heads in kRunRows rows, as a power of two, so that a run never
// reaches into two tiles of kDenseTileNodes tokens.
constexpr int run_tokens_log2(int64_t group) {
  int log2 = 0;
  while ((int64_t{2} << log2) * group <= kRunRows) {
    ++log2;
  }
  return log2;
}

constexpr int64_t run_tokens(int64_t group) {
  return int64_t{1} << run_tokens_log2(group);
}

// The marks of a tile under a run's lists: a byte for each token of the run, and whole 16 bytes for one bulk copy. Bit p
// of a byte: the token's list holds parent p of the tile.
constexpr int kTileParents = kDenseTileNodes / kTensorCoreRate;
static_assert(kTileParents == 8);
constexpr int64_t mark_bytes(int64_t group) {
  return run_tokens(group) < 16 ? 16 : run_tokens(group);
}

// The runs that hold `num_queries` queries from token t0 on.
constexpr int64_t num_runs(int64_t t0, int64_t num_queries, int64_t group) {
  const int log2 = run_tokens_log2(group);
  return ((t0 + num_queries - 1) >> log2) - (t0 >> log2) + 1;
}

// A tile of query rows or of rows of dO for half a run, and its numbers, see backward/dense_rows/rows.cuh.
constexpr int kRowTileRows = kRunRows / 2;
constexpr int kRowNumbers = 5;
constexpr int64_t row_tile_bytes(int64_t dim) {
  return (dim + 63) / 64 * kRowTileRows * 128;
}

}  // namespace htree::tree_attention
