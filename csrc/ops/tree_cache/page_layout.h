// Where a page of the tree cache keeps its rows. No torch. docs/semantics/tree_cache.md §7.1.
#pragma once

#include <cstdint>

#include "device/sizes.h"
#include "ops/tree/tree_args.h"

namespace htree::tree_cache {

// Positions are below 2^31 and r is at least 2, so no tree has more layers.
constexpr int kMaxLayers = 32;

// Page `page` of a block table, row `row` in it.
struct Place {
  uint32_t page;
  uint32_t row;
};

// The rows of a page for one K/V head: the tokens, then the finished nodes of layer 1, of layer 2 and so on,
// each layer ascending, and for keys the span means. A node stands in the page in which its last token
// stands. Sizes are 32-bit because the kernels divide by them for every row.
struct PageLayout {
  uint32_t page_size = 256;  // P, tokens
  uint32_t rate = 16;        // r
  uint32_t num_layers = 1;   // L
  uint32_t span = 0;         // c, tokens of a span mean; 0: none
  uint32_t num_pages = 0;    // of the pools
  uint32_t max_pages = 0;    // of a sequence
  uint32_t num_kv_heads = 1;
  uint32_t first_row[kMaxLayers + 1] = {};  // where layer l begins; [L] is the first span mean
  uint32_t tokens[kMaxLayers] = {};         // r^l, tokens of a node

  HTREE_HOST_DEVICE int64_t value_rows() const { return first_row[num_layers]; }
  HTREE_HOST_DEVICE int64_t key_rows() const { return value_rows() + (span > 0 ? page_size / span : 0); }
  HTREE_HOST_DEVICE int64_t capacity() const { return int64_t{max_pages} * page_size; }

  // The place of a finished node of a layer.
  HTREE_HOST_DEVICE Place node(uint32_t layer, uint32_t index) const {
    const uint32_t size = tokens[layer];
    const uint32_t page = ((index + 1) * size - 1) / page_size;
    return {page, first_row[layer] + index - page * page_size / size};
  }
  // The place of the mean of tokens [c index, c (index + 1)).
  HTREE_HOST_DEVICE Place span_mean(uint32_t index) const {
    const uint32_t page = index * span / page_size;
    return {page, first_row[num_layers] + index - page * (page_size / span)};
  }
};

// The layout of pages with num_layers layers. max_pages * page_size is below 2^31.
inline PageLayout page_layout(int64_t page_size, int64_t rate, int64_t num_layers, int64_t span,
                              int64_t num_pages, int64_t max_pages, int64_t num_kv_heads) {
  PageLayout layout;
  layout.page_size = static_cast<uint32_t>(page_size);
  layout.rate = static_cast<uint32_t>(rate);
  layout.num_layers = static_cast<uint32_t>(num_layers);
  layout.span = static_cast<uint32_t>(span);
  layout.num_pages = static_cast<uint32_t>(num_pages);
  layout.max_pages = static_cast<uint32_t>(max_pages);
  layout.num_kv_heads = static_cast<uint32_t>(num_kv_heads);
  uint32_t row = 0;
  for (int64_t layer = 0; layer < num_layers; ++layer) {
    const int64_t tokens = tree_attention::node_span(rate, layer);
    layout.first_row[layer] = row;
    layout.tokens[layer] = static_cast<uint32_t>(tokens);
    row += static_cast<uint32_t>(ceil_div(page_size, tokens));
  }
  layout.first_row[num_layers] = row;
  return layout;
}

}  // namespace htree::tree_cache
