// How select_blocks chooses, for the CPU and the CUDA kernels. docs/semantics/selection.md §9.1. No torch.
#pragma once

#include "ops/tree/tree_args.h"

namespace htree::tree_attention {

struct BlockOptions {
  int64_t count = 0;  // entries of a list
  int64_t block_size = 16;
  int64_t stride = 1;  // queries that share a list
  int64_t local = 1;   // the diagonal block and those before it that are listed whatever they score
  int64_t first = 0;   // the first blocks, likewise
  bool open_next = false;
};

// Whether a block at or before the diagonal one is listed whatever it scores.
HTREE_HOST_DEVICE bool block_is_forced(const BlockOptions& options, int64_t block, int64_t diagonal) {
  return block > diagonal - options.local || block < options.first;
}

// With open_next, how many of the `num_blocks` blocks up to the diagonal one come before those behind them: the best
// half of a list, and all forced ones. 0 where that chooses what the scores alone choose.
HTREE_HOST_DEVICE int64_t best_blocks(const BlockOptions& options, int64_t num_blocks) {
  if (!options.open_next || num_blocks <= options.count) {
    return 0;
  }
  const int64_t half = (options.count + 1) / 2;
  const int64_t forced = options.local + options.first;
  return forced > half ? forced : half;
}

}  // namespace htree::tree_attention
