// How sparse_attention cuts a call into chunks of queries on CUDA. Pure functions of the sizes, testable without a GPU. No
// CUDA and no torch.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ops/tree/plan/problem.h"

namespace htree::tree_attention {

struct SparseProblem {
  int64_t batch = 1, num_queries = 1, num_keys = 1;
  int64_t num_kv_heads = 1, group = 1;
  int64_t value_dim = 1;
  int64_t list_width = 1;  // n of the caller's lists
  int64_t block_size = 16;
  int64_t stride = 1;

  int64_t num_blocks() const { return ceil_div(num_keys, block_size); }
  // Entries of a list as the kernels read it: every visible block once, and one that says that the diagonal block is none
  // of them.
  int64_t visible_width() const { return std::min(list_width, num_blocks()) + 1; }
  int64_t list_rows(int64_t queries) const { return ceil_div(queries, stride); }
};

// Whole batches with all of their queries, or a range of the queries of one, a multiple of the stride.
struct SparseChunks {
  int64_t batches = 1, queries = 1;
};

// The most scratch of a chunk, unless one list needs more.
constexpr int64_t kSparseScratchBytes = int64_t{512} << 20;

// Chunks whose lists take `list_bytes` each, and `batch_bytes` beside them for every batch in the chunk.
inline SparseChunks sparse_chunks(const SparseProblem& p, int64_t list_bytes, int64_t batch_bytes) {
  const int64_t per_batch = p.list_rows(p.num_queries) * list_bytes + batch_bytes;
  SparseChunks chunks;
  // Batch and K/V head together are the y dimension of a grid.
  constexpr int64_t kMostPairs = 65535;
  const int64_t most = std::clamp<int64_t>(kMostPairs / p.num_kv_heads, 1, p.batch);
  if (per_batch <= kSparseScratchBytes) {
    chunks.queries = p.num_queries;
    chunks.batches = std::clamp<int64_t>(kSparseScratchBytes / std::max<int64_t>(1, per_batch), 1, most);
    return chunks;
  }
  const int64_t lists = std::max<int64_t>(1, (kSparseScratchBytes - batch_bytes) / list_bytes);
  chunks.queries = std::min(p.num_queries, lists * p.stride);
  return chunks;
}

// The forward keeps the scores of a chunk and its states.
inline SparseChunks sparse_forward_chunks(const SparseProblem& p) {
  const int64_t width = p.visible_width(), heads = p.num_kv_heads * p.group;
  const int64_t query = heads * (width * p.block_size + p.value_dim + 2) * 4;
  return sparse_chunks(p, p.stride * query + p.num_kv_heads * width * 4, 0);
}

// The backward keeps the lists of a chunk and their inverse: entries, and counters for each run of lists and block.
inline SparseChunks sparse_backward_chunks(const SparseProblem& p) {
  const int64_t counters = p.num_kv_heads * p.num_blocks() * 4;
  const int64_t list = p.num_kv_heads * (p.visible_width() * 8 + 4) + ceil_div(counters, kInvertedListRows);
  return sparse_chunks(p, list + p.stride * p.num_kv_heads * p.group * 4, 2 * counters);
}

}  // namespace htree::tree_attention
