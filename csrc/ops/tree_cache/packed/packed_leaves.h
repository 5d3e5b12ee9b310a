// Tokens of a page in 8 or 4 bits, beside pools that hold nodes and span means alone. No torch.
// docs/semantics/tree_cache.md §7.5
#pragma once

#include "ops/compressed_kv/format.h"
#include "ops/tree_cache/page_layout.h"

namespace htree::tree_cache {

// The layout of pages whose tokens have pools of their own: the first node is row 0 of a page. node(0, token) is
// still the place of a token, in those pools.
inline PageLayout without_token_rows(PageLayout layout) {
  for (uint32_t layer = 1; layer <= layout.num_layers; ++layer) {
    layout.first_row[layer] -= layout.page_size;
  }
  return layout;
}

// The format of a token's row. Every channel is kept, so the row needs no bitmap.
inline compressed_kv::RowFormat leaf_format(int64_t width, int64_t code_bytes) {
  return {static_cast<int>(width), static_cast<int>(width), static_cast<int>(8 * code_bytes / width)};
}

}  // namespace htree::tree_cache
