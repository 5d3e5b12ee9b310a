// The ops on states: merge, reverse subtraction, normalisation. docs/semantics/tree_attention.md §1.7
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include "ops/tree/cuda/any/geometry.h"

namespace htree::tree_attention {

// [B, T, H] and [B, T, H, V] with any strides, in elements.
template <typename A>
struct StridedState {
  A* max = nullptr;
  A* sum = nullptr;
  A* out = nullptr;
  int64_t max_strides[3] = {};
  int64_t sum_strides[3] = {};
  int64_t out_strides[4] = {};
};

struct MergeParams {
  StridedState<float> global;
  StridedState<const float> layer;
  int64_t num_batches = 0;
  int64_t num_rows = 0;
  int64_t num_heads = 0;
  int64_t value_dim = 0;
};
cudaError_t launch_merge_to_global(const MergeParams& params, cudaStream_t stream);

template <typename T>
struct NormalizeParams {
  StridedState<const float> state;  // `max` is not read
  T* out = nullptr;                 // [B, T, H, V] contiguous
  int64_t num_batches = 0;
  int64_t num_rows = 0;
  int64_t num_heads = 0;
  int64_t value_dim = 0;
};
// T is float, __half or __nv_bfloat16.
template <typename T>
cudaError_t launch_final_normalize(const NormalizeParams<T>& params, cudaStream_t stream);

template <typename T>
struct SubtractParams {
  View<const T> values;         // [B, N, H_kv, V]
  View<const int32_t> indices;  // [B, T_q, H, top_k], -1 tail
  View<const float> scores;     // [B, T_q, H, top_k]
  float* max = nullptr;         // [B, T_q, H] contiguous, updated in place like the next two
  float* sum = nullptr;         // [B, T_q, H]
  float* out = nullptr;         // [B, T_q, H, V]
  int64_t num_batches = 0;
  int64_t num_rows = 0;
  int64_t num_heads = 0;
  int64_t heads_per_kv_head = 1;
  int64_t num_nodes = 0;
  int64_t value_dim = 0;
  int64_t top_k = 0;
};
// T is float, __half or __nv_bfloat16.
template <typename T>
cudaError_t launch_subtract_topk(const SubtractParams<T>& params, cudaStream_t stream);

}  // namespace htree::tree_attention
