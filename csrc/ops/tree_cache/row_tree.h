// The tree that a row walks: that of the tokens up to its own. For CPU and CUDA. No torch.
// docs/semantics/tree_cache.md §7.3
#pragma once

#include <algorithm>
#include <cstdint>

#include "device/sizes.h"

namespace htree::tree_cache {

// Whether the top of a tree may have more nodes than the children of a list. Then all of them up to a row's own are its
// candidates, and the lists of its top and of the layers above are -1 and never read. Else these lists open everything.
constexpr bool has_open_top(int64_t max_top_nodes, int64_t top_k, int64_t rate) {
  return max_top_nodes > top_k * rate;
}

// The most parents that a row's candidates have in a layer: k below its top, and at the top as many as it has. No tree has
// more than `most_tokens` tokens.
constexpr int64_t most_parents(int64_t max_top_nodes, int64_t top_k, int64_t rate, int64_t most_tokens) {
  return std::max(top_k, std::min(ceil_div(max_top_nodes, rate), ceil_div(most_tokens, rate)));
}

}  // namespace htree::tree_cache
