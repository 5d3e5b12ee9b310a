// Lists that an index chooses, on CUDA. docs/semantics/tree_cache.md §7.7
#pragma once

#include "ops/tree_cache/index/sm90/choice_plan.h"
#include "ops/tree_cache/tree_cache.h"
#include "ops/tree_cache/tree_cache_params.h"

namespace htree::tree_cache {

// How one launch chooses for `rows` rows of a call, which Hopper has; not taken where choose_by_index() must.
// `wanted_cluster` as in plan_choice().
ChoicePlan index_choice_plan(const IndexInputs& index, const PageLayout& layout, const CacheOptions& options,
                             int64_t rows, int wanted_cluster);
// Writes the lists of the chunk's leaders for all layers into `call.chunk.lists`. Rows need no description.
void choose_in_one_launch(const IndexInputs& index, const AttendParams<__nv_bfloat16>& call,
                          const ChoicePlan& plan, cudaStream_t stream);
// Floats of the block scores of one row and index head, in a cache of this layout.
int64_t index_score_row(const PageLayout& layout);
// Writes the lists of the chunk's leaders for all layers below the last one into `chunk.lists`.
void choose_by_index(const IndexInputs& index, const PageLayout& layout, const CacheSequences& sequences,
                     const CacheOptions& options, const RowChunk& chunk, cudaStream_t stream);

}  // namespace htree::tree_cache
