// Lists that an index chooses, on the CPU. docs/semantics/tree_cache.md §7.7
#pragma once

#include <algorithm>
#include <vector>

#include "ops/tree_cache/tree_cache.h"

namespace htree::tree_cache {

// Rows of a call from `first_row` on, which are the tokens [first_token, length) of a sequence.
struct IndexedRows {
  int64_t sequence, first_row, first_token, length;
};

// The lists of the leaders among them, for the layers below the top of the sequence: above, every node is opened.
struct IndexLists {
  int64_t first_stride = 0;       // that of the first leader
  std::vector<Tensor> of_layers;  // int32 [leaders, H_i, k or what a list of the sequence can hold]

  // Writes the list [k] of a layer that the leader of `stride` has for a K/V head.
  void copy(int64_t layer, int64_t stride, int64_t head, int64_t k, int32_t* to) const {
    const Tensor& lists = of_layers[static_cast<size_t>(layer)];
    const int64_t heads = lists.size(1), width = lists.size(2);
    const int64_t row = (stride - first_stride) * heads + (heads == 1 ? 0 : head);
    std::copy_n(lists.const_data_ptr<int32_t>() + row * width, width, to);
    std::fill(to + width, to + k, -1);
  }
};

IndexLists index_lists_cpu(const Pools& pools, const PageLayout& layout, const IndexInputs& index,
                           const AttentionArgs& args, const IndexedRows& rows);

}  // namespace htree::tree_cache
