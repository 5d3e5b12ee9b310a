// What the gradients of a layer on the tensor cores share, docs/semantics/tree_attention.md §1.10. No torch.
//
// Nothing is added with atomics: dQ belongs to a warp per query, dK and dV of a parent's children to one block that
// walks the parent's users in the order of their lists.
#pragma once

#include "ops/tree_attention/cuda/backward/gradient_rows.h"

namespace htree::tree_attention {

// Common to both gradients of a layer.
struct GradientParams {
  GatherParams gather;  // its queries are not used
  const char* records = nullptr;
  bool tiled = false;
  const RowMeta* meta = nullptr;
  const KeyBounds* key_bounds = nullptr;
  const QueryBounds* query_bounds = nullptr;
  const uint32_t* selected = nullptr;  // null at the bottom
  int64_t mask_words = 0;
  float scale = 0.f;
};

}  // namespace htree::tree_attention
