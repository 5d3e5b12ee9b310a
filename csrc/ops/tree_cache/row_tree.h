// The tree that a row walks: that of the tokens up to its own. For CPU and CUDA. No torch.
// docs/semantics/tree_cache.md §7.3
#pragma once

#include <algorithm>
#include <cstdint>

#include "device/sizes.h"
#include "ops/tree/open_top.h"

namespace htree::tree_cache {

using tree_attention::has_open_top;

// The most parents that a row's candidates have in a layer: k below its top, and at the top as many as it has. No tree has
// more than `most_tokens` tokens.
constexpr int64_t most_parents(int64_t max_top_nodes, int64_t top_k, int64_t rate, int64_t most_tokens) {
  return std::max(top_k, std::min(ceil_div(max_top_nodes, rate), ceil_div(most_tokens, rate)));
}

}  // namespace htree::tree_cache
