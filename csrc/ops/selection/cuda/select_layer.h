// The selection of one layer of a call. No torch.
#pragma once

#include "ops/tree/cuda/tree_call.h"

namespace htree::tree_attention {

// Selects the lists of the layer below, for some leaders at a time. `mask` [num_batches, lists of the chunk,
// H_kv, mask_words()] may be null. `scratch` has selection_bytes().
void select_layer(const TreeCall& call, size_t layer_idx, const Chunk& chunk, const ListSlice& lists,
                  const ListSlice& next, float* scratch, uint32_t* mask, cudaStream_t stream);

}  // namespace htree::tree_attention
