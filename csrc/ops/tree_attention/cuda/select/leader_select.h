// Exact selection of the next layer's parents. No torch.
#pragma once

#include "ops/tree_attention/cuda/launch_params.h"

namespace htree::tree_attention {

// Exact selection: docs/semantics/tree_attention.md §1.6.
struct LeaderSelectParams {
  GatherParams gather;            // of the layer the scores belong to
  const float* scores = nullptr;  // as ListScoreParams, or importances [B, num_lists, H_kv, score_width]
  int64_t score_width = 0;
  const float2* sums = nullptr;  // as ListScoreParams; null where `scores` are importances
  int num_runs = 0;
  int32_t* next_lists = nullptr;  // [B, num_lists, H_kv, list_width] node ids, ascending, -1 tail
  int64_t next_batch = 0;         // stride in elements
  uint32_t* selected =
      nullptr;  // [B, num_lists, H_kv, mask_words]: bit p = candidate p is selected; may be null
  int64_t selected_batch = 0;  // stride in words
  int64_t mask_words = 0;      // >= score_width / 32
  Importance importance = Importance::kLseCausal;
};
cudaError_t launch_leader_select(const LeaderSelectParams& params, cudaStream_t stream);

}  // namespace htree::tree_attention
