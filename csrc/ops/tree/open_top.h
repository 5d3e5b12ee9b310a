// docs/semantics/tree_attention.md §1.3. For CPU and CUDA. No torch.
#pragma once

#include <cstdint>

namespace htree::tree_attention {

// Whether the top of a tree may have more nodes than the children of a list. Then a row walks the tree of its own prefix:
// all nodes of that tree's top up to the row's own are its candidates, and the lists of its top and of the layers above are
// -1 and never read. Else these lists open everything.
constexpr bool has_open_top(int64_t max_top_nodes, int64_t top_k, int64_t rate) {
  return max_top_nodes > top_k * rate;
}

}  // namespace htree::tree_attention
