// How the staged kernels cut a call of one layer into chunks. Pure functions of the sizes.
#pragma once

#include <algorithm>
#include <cstdint>

namespace htree::tree_attention {

// The most bytes for the scores of one chunk, unless one list row of one kv head needs more.
constexpr int64_t kScoreScratchBytes = int64_t{256} << 20;

// A box of rows: whole batches with all their queries, or a range of queries of one batch, or a range of the
// lists of such queries. A box starts at a leader: first_query is a multiple of the selection stride.
struct ChunkPlan {
  int64_t batches = 1;
  int64_t queries = 1;
  int64_t lists = 1;
};

// `row_bytes` is the scratch of one (query, list). A box has at least `stride` queries of one list.
inline ChunkPlan plan_chunks(int64_t num_batches, int64_t num_queries, int64_t num_lists, int64_t stride,
                             int64_t row_bytes, int64_t budget) {
  const int64_t rows = std::max<int64_t>(1, budget / std::max<int64_t>(1, row_bytes));
  ChunkPlan plan;
  plan.lists = std::clamp<int64_t>(rows / std::min(stride, num_queries), 1, num_lists);
  if (plan.lists < num_lists) {
    plan.queries = std::min(stride, num_queries);
    return plan;
  }
  const int64_t blocks = std::max<int64_t>(1, rows / num_lists / stride);
  plan.queries = std::min(num_queries, blocks * stride);
  if (plan.queries == num_queries) {
    plan.batches = std::clamp<int64_t>(rows / (num_lists * num_queries), 1, num_batches);
  }
  return plan;
}

// Calls f(batch, num_batches, query, num_queries, list, num_lists) for every box.
template <typename F>
void for_each_chunk(const ChunkPlan& plan, int64_t num_batches, int64_t num_queries, int64_t num_lists,
                    F&& f) {
  for (int64_t batch = 0; batch < num_batches; batch += plan.batches) {
    for (int64_t query = 0; query < num_queries; query += plan.queries) {
      for (int64_t list = 0; list < num_lists; list += plan.lists) {
        f(batch, std::min(plan.batches, num_batches - batch), query,
          std::min(plan.queries, num_queries - query), list, std::min(plan.lists, num_lists - list));
      }
    }
  }
}

}  // namespace htree::tree_attention
