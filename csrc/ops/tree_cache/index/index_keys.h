// Index keys in pages, by which the nodes of a tree are chosen: a pool beside those of keys and values.
// docs/semantics/tree_cache.md §7.7
#pragma once

#include "ops/tree_attention/listed_attention.h"
#include "ops/tree_cache/tree_cache.h"

namespace htree::tree_cache {

// The pages of index keys [num_pages, H_i, P, d] as a layout of their own: a page has its tokens alone.
inline PageLayout index_layout(const PageLayout& layout, int64_t heads) {
  return page_layout(layout.page_size, layout.rate, /*num_layers=*/1, /*span=*/0, layout.num_pages,
                     layout.max_pages, heads);
}

using tree_attention::check_index_options;

// `pools` come checked.
void check_index_pool(const char* op, const Pools& pools, const IndexPool& index, int64_t page_size);
// index_query or index_key, [N, H_i, d] or [B, n, H_i, d] as the rows `like` are.
void check_index_rows(const char* op, const char* name, const Tensor& rows, const char* like_name,
                      const Tensor& like, const Tensor& index_pool);

// Writes the index keys `call.k` of new tokens into their pages; `call.v` is not read. The checks of an append have passed.
using AppendIndex = void(const Pools& pools, const IndexPool& index, const PageLayout& layout,
                         const AppendCall& call);
AppendIndex append_index_cpu, append_index_cuda;

}  // namespace htree::tree_cache
