// Calls over a sequence that grows, on copies with capacity for more of it: tree/plan/growing_tree.h. Whoever has the
// tokens fills the copies, see ops/tree_cache/prompt/.
#pragma once

#include "ops/tree/cuda/cuda_tree.h"
#include "ops/tree/plan/growing_tree.h"

namespace htree::tree_attention {

// The bytes of the copies of sequences of up to problem.num_keys tokens on the current device; 0 where calls over them
// take the general path, which reads no copies.
int64_t growing_tree_bytes(const AttentionProblem& problem);

// What tokens [begin, problem.num_keys) change on the current device.
TreeChange growing_tree_change(const AttentionProblem& problem, int64_t begin);

// A call over the copies in `memory`, for up to `capacity` tokens. Its queries are not set, nor are the tiles
// of its dense and masked rows.
TreeCall growing_tree_call(const AttentionProblem& problem, const TreeConfig& config, HalfType dtype,
                           int64_t capacity, void* memory);

// Fills the tables among the copies, which depend on the options alone.
void fill_growing_tables(const TreeCall& call, cudaStream_t stream);

}  // namespace htree::tree_attention
