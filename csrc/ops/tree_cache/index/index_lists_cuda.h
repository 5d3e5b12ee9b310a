// Lists that an index chooses, on CUDA. docs/semantics/tree_cache.md §7.7
#pragma once

#include "ops/tree_cache/tree_cache.h"
#include "ops/tree_cache/tree_cache_params.h"

namespace htree::tree_cache {

// Floats of the block scores of one row and index head, in a cache of this layout.
int64_t index_score_row(const PageLayout& layout);
// Writes the lists of the chunk's leaders for all layers below the last one into `chunk.lists`.
void choose_by_index(const IndexInputs& index, const PageLayout& layout, const CacheSequences& sequences,
                     const CacheOptions& options, const RowChunk& chunk, cudaStream_t stream);

}  // namespace htree::tree_cache
