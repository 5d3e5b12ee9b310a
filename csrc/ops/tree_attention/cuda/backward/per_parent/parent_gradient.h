// dK and dV with a block or a warp for every parent. No torch.
#pragma once

#include "ops/tree_attention/cuda/backward/gradient_params.h"

namespace htree::tree_attention {

struct KeyGradientParams {
  GradientParams common;
  const int32_t* counts = nullptr;    // [B, num_lists, H_kv]
  const uint32_t* entries = nullptr;  // of InverseParams; null: the implicit lists of the top
  const uint32_t* offsets = nullptr;
  float* keys = nullptr;    // [num_batches, H_kv, 16 num_parents, K]; null: not wanted
  float* values = nullptr;  // [num_batches, H_kv, 16 num_parents, V]
  bool add = false;         // to what is there, else replace it
  // For launch_parent_gradient alone: the window of lists, and fp16 rotations of every position.
  uint32_t first_list = 0, end_list = 0;
  const __half2* rotations = nullptr;
};
template <typename T, int kDim>
cudaError_t launch_key_gradient(const KeyGradientParams& params, cudaStream_t stream);

// Records of a head whose users all its parents walk at a time: they stay in the L2.
constexpr int64_t kParentWindowBytes = int64_t{16} << 20;
// The same from the users of a window of lists and tiled records, a warp per parent or, for implicit lists, four.
template <typename T, int kDim>
cudaError_t launch_parent_gradient(const KeyGradientParams& params, cudaStream_t stream);

}  // namespace htree::tree_attention
