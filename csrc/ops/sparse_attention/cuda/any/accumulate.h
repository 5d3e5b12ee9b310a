// Softmax states of the candidates whose score is not -inf. docs/semantics/tree_attention.md §1.7, §1.8
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include "ops/tree/cuda/any/geometry.h"

namespace htree::tree_attention {

// A state: max and sum [B, T_q, H], out [B, T_q, H, V]. Strides count heads; those of `out` are
// V times as long.
struct StateView {
  float* max = nullptr;
  float* sum = nullptr;
  float* out = nullptr;
  int64_t batch = 0;
  int64_t row = 0;  // H of the whole tensor
};

template <typename T>
struct AccumulateParams {
  Geometry geometry;
  View<const T> values;                     // [B, N, H_kv, V]
  View<const int32_t> parents;              // [B, ceil(T_q / queries_per_list), S, list_width]
  const float* scores = nullptr;            // [B, T_q, S, capacity, G] contiguous
  const int32_t* num_candidates = nullptr;  // [B, T_q, S] contiguous
  StateView state;
  int64_t value_dim = 0;  // V
};

// T is float, __half or __nv_bfloat16. The value of a candidate whose scores are all -inf is not read.
template <typename T>
cudaError_t launch_accumulate(const AccumulateParams<T>& params, cudaStream_t stream);

}  // namespace htree::tree_attention
