// Scores of the leaders over the candidates of their lists. No torch.
#pragma once

#include "ops/tree_attention/cuda/launch_params.h"

namespace htree::tree_attention {

// Slots that one warp scores: short enough to fill the chip, long enough to hide the start.
constexpr int kRunSlots = 64;

// Scores of the leaders and, for every run of kRunSlots slots and head, (maximum, sum of 2^(s - maximum))
// over the candidates that are ranked, or over all n for kLse. Entries p >= n of a row are not written, nor
// are runs past its last slot.
struct ListScoreParams {
  GatherParams gather;
  Importance importance = Importance::kLseCausal;
  float* scores = nullptr;  // [B, num_lists, H_kv, score_width, G]
  int64_t score_width = 0;  // >= the largest n of the chunk
  float2* sums = nullptr;   // [B, num_lists, H_kv, num_runs, G]
  int num_runs = 0;         // score_runs(score_width)
};
constexpr int64_t score_runs(int64_t score_width) {
  return (score_width + kRunSlots * kTensorCoreRate - 1) / (kRunSlots * kTensorCoreRate);
}
template <typename T, int kDim>
cudaError_t launch_list_scores(const ListScoreParams& params, cudaStream_t stream);

}  // namespace htree::tree_attention
