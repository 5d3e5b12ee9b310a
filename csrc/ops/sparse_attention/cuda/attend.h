// One softmax step over a layer, r = 16, fp16 or bf16 inputs, K = V in {32, 64, 128}. Each method defines its
// launcher in attend.cuh of its folder. No torch.
#pragma once

#include "ops/sparse_attention/cuda/sm90/tile_marks.h"
#include "ops/tree/cuda/copies.h"
#include "ops/tree/cuda/launch_params.h"

namespace htree::tree_attention {

// Merges the softmax over the candidates that are not selected into the running state. Between layers maxima
// are in log2 units; the last layer converts them and writes the output.
struct AttendParams {
  GatherParams gather;
  // Table of list_width + 1 slots, for shared_gather/ and per_list/; null: nothing is rotated.
  const __half2* rotations = nullptr;
  const uint32_t* selected = nullptr;  // bit p: candidate p is selected; null at the bottom
  int64_t selected_batch = 0;
  int64_t mask_words = 0;
  bool first = false;  // no layer came before: there is no state yet
  bool last = false;
  float* max = nullptr;  // [B, T_q, H]
  float* sum = nullptr;
  int64_t state_batch = 0;   // stride of max and sum in elements
  float* partial = nullptr;  // [num_batches, num_queries, H, V]: the state between layers
  void* out = nullptr;       // [B, T_q, H, V] in the input's dtype
  // Of a caller's lists, which have one layer: [H], a score beside the keys' that has no value; null: none.
  const float* sinks = nullptr;
  int64_t masked_end = 0;  // some rows before this token are masked ones, which are not gathered
};

// ---- each query gathers for itself: sm_80 and later

template <typename T, int kDim>
cudaError_t launch_per_query_attend(const AttendParams& params, cudaStream_t stream);

// ---- neighbouring queries share a gather: Hopper (sm_90a), G <= 16

// Takes params.rotations in RotationOrder::kFragments.
template <typename T, int kDim>
cudaError_t launch_shared_gather_attend(const AttendParams& params, cudaStream_t stream);

// ---- all queries of a list are rows of the same products: Hopper (sm_90a), any G

// Takes params.rotations in RotationOrder::kDims. The lists must be those of the selection: a list holds
// min(list_width, parents up to the queries' own) entries, or as many as gather.list_sizes says.
template <typename T, int kDim>
cudaError_t launch_per_list_attend(const AttendParams& params, cudaStream_t stream);

// ---- the dense top, with one launch over all queries of a chunk: Hopper (sm_90a)

// The first step of a call: `attend.first` holds, and max, sum and partial are written.
struct DenseAttendParams {
  AttendParams attend;
  DenseTiles tiles;
};
template <typename T, int kDim>
cudaError_t launch_dense_attend(const DenseAttendParams& params, cudaStream_t stream);

// ---- the rows before max_top_nodes, as dense causal attention over the tokens: Hopper (sm_90a)

// `attend.first` and `attend.last` hold: max, sum and out are written.
template <typename T, int kDim>
cudaError_t launch_dense_rows(const DenseAttendParams& params, cudaStream_t stream);

// ---- rows without rotations whose lists cover much of the sequence: tiles of tokens under the bits of their lists, with
// the runs of rows of forward/dense_rows/, Hopper (sm_90a)

struct MaskedAttendParams {
  DenseAttendParams dense;  // `attend.last` holds
  TileMarks marks;
};
template <typename T, int kDim>
cudaError_t launch_masked_rows(const MaskedAttendParams& params, cudaStream_t stream);

}  // namespace htree::tree_attention
