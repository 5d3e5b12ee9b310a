// Sizes of the dense rows, the queries before `max_top_nodes`: docs/semantics/tree_attention.md §1.5. No CUDA and no
// torch.
#pragma once

#include "ops/tree_attention/plan/problem.h"

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
