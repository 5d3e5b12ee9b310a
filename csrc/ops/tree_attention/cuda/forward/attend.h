// One softmax step over a layer. Each method defines its launcher in its folder, in attend.cuh. No torch.
#pragma once

#include "ops/tree_attention/cuda/launch_params.h"
#include "ops/tree_attention/cuda/tree/copies.h"

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

// ---- A softmax step with a gather for every query of its own: sm_80 and later. No torch.

template <typename T, int kDim>
cudaError_t launch_per_query_attend(const AttendParams& params, cudaStream_t stream);

// ---- Launcher of the kernels in which neighbouring queries share one gather, on Hopper (sm_90a): r = 16, fp16 or
// bf16 inputs, K = V in {32, 64, 128}, G <= 16. No torch.

// params.rotations in RotationOrder::kFragments.
template <typename T, int kDim>
cudaError_t launch_shared_gather_attend(const AttendParams& params, cudaStream_t stream);

// ---- Launchers of the kernels that take the queries of a list together, on Hopper (sm_90a): r = 16, fp16 or bf16
// inputs, K = V in {32, 64, 128}, any G. No torch.

// params.rotations in RotationOrder::kDims. Lists are those that the selection writes: a list holds min(list_width, parents
// up to the queries' own) entries.
template <typename T, int kDim>
cudaError_t launch_per_list_attend(const AttendParams& params, cudaStream_t stream);

// ---- The softmax over what was not selected at a dense top, one launch over all queries of a chunk, on Hopper (sm_90a).
// No torch.

// As launch_attend for the top layer, which is the first: writes max, sum and partial.
struct DenseAttendParams {
  AttendParams attend;
  DenseTiles tiles;
};
template <typename T, int kDim>
cudaError_t launch_dense_attend(const DenseAttendParams& params, cudaStream_t stream);

}  // namespace htree::tree_attention
