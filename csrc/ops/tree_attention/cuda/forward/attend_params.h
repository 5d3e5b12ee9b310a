// One softmax step over a layer, whichever kernel takes it. No torch.
#pragma once

#include "ops/tree_attention/cuda/launch_params.h"

namespace htree::tree_attention {

// Softmax over the candidates that are not selected, merged into the running state. Maxima between layers are
// in log2 units; the last layer converts them and writes the output.
struct AttendParams {
  GatherParams gather;
  const __half2* rotations =
      nullptr;  // rotation table of list_width + 1 slots, for shared_gather/ and per_list/
  const uint32_t* selected = nullptr;  // as above; null at the bottom, where nothing is selected
  int64_t selected_batch = 0;
  int64_t mask_words = 0;
  bool first = false;  // no state yet
  bool last = false;
  float* max = nullptr;  // [B, T_q, H]
  float* sum = nullptr;
  int64_t state_batch = 0;   // stride of max and sum in elements
  float* partial = nullptr;  // [num_batches, num_queries, H, V], the state between layers
  void* out = nullptr;       // [B, T_q, H, V] in the input's dtype
};

}  // namespace htree::tree_attention
