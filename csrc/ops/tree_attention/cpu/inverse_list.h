// Parent lists the other way round.
#pragma once

#include <cstdint>
#include <vector>

#include "ops/tree_attention/cpu/query_kernels.h"

namespace htree::tree_attention {

// Which queries of a chunk have a parent in their list: entries [begin[p], begin[p + 1]) belong to parent p,
// in ascending order of the query.
struct InverseList {
  struct Entry {
    int32_t query;
    int32_t slot;
  };
  std::vector<int64_t> begin;
  std::vector<Entry> entries;

  // candidates: one per query, with count 0 for a query that merges nothing.
  void build(const std::vector<Candidates>& candidates, int64_t num_queries, int64_t num_parents) {
    begin.assign(num_parents + 1, 0);
    const auto for_each = [&](auto&& visit) {
      for (int64_t i = 0; i < num_queries; ++i) {
        const Candidates& list = candidates[i];
        for (int64_t slot = 0; list.count > 0 && slot < list.num_parents; ++slot) {
          const int64_t parent = list.parents[slot];
          if (parent >= 0 && parent < num_parents) visit(parent, i, slot);
        }
      }
    };
    for_each([&](int64_t parent, int64_t, int64_t) { ++begin[parent + 1]; });
    for (int64_t p = 0; p < num_parents; ++p) {
      begin[p + 1] += begin[p];
    }
    entries.resize(begin[num_parents]);
    std::vector<int64_t> next(begin.begin(), begin.end() - 1);
    for_each([&](int64_t parent, int64_t i, int64_t slot) {
      entries[next[parent]++] = {static_cast<int32_t>(i), static_cast<int32_t>(slot)};
    });
  }
};

}  // namespace htree::tree_attention
