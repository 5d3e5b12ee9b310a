// The lists that an index chooses for tree attention: docs/semantics/tree_attention.md §1.17.
#pragma once

#include <vector>

#include "ops/selection/select_blocks.h"
#include "ops/tree/options.h"

namespace htree::tree_attention {

// Raises where options choose in another way than an index does.
void check_index_options(const char* op, const TreeOptions& options);
// Raises unless there is one index head, or one for each K/V head.
void check_index_heads(const char* op, const char* name, const Tensor& x, const SymInt& heads,
                       const SymInt& kv_heads);
// How nodes above the tokens are chosen as blocks.
BlockOptions blocks_of_nodes(const TreeOptions& options);

// Writes the lists of all layers from the tokens on, int32 [B, ceil(T_q / s), H_kv, list_width()] each: of index_query
// [B, T_q, H_i, d] behind `start` tokens, index_key [B, start + T_q, H_i, d]. The top layer's lists hold every node; with an
// open top (segments.h), the lists of a row's top and of the layers above it are -1.
void write_index_lists(SelectBlockLayers* kernel, const char* op, const TreeOptions& options,
                       const Tensor& index_query, const Tensor& index_key, const std::vector<Tensor>& lists);

}  // namespace htree::tree_attention
