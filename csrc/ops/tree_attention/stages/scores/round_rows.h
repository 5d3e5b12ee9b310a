// Rows rounded to int8 for the scores of full lists. docs/semantics/tree_attention.md §1.15
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include "ops/tree_attention/stages/geometry.h"

namespace htree::tree_attention {

// Row i of every batch and head is rotated to position (first + i * step) / span, or to the last one of the table, and
// then rounded. The integers are stored as T, which holds them exactly, so that the kernels of other scores read them.
template <typename T>
struct RoundRowsParams {
  View<const T> rows;        // [num_batches, num_rows, num_heads, key_dim]
  RotaryTable<float> table;  // [last_position + 1, key_dim / 2]
  T* integers = nullptr;     // [num_batches, num_rows, num_heads, key_dim] contiguous
  float* steps = nullptr;    // [num_batches, num_rows, num_heads] contiguous, times the scale
  int64_t num_batches = 0;
  int64_t num_rows = 0;
  int64_t num_heads = 0;
  int64_t key_dim = 0;
  int64_t first = 0;
  int64_t step = 1;
  int64_t span = 1;
  int64_t last_position = 0;
  float scale = 1.0f;
};

// T is float, __half or __nv_bfloat16.
template <typename T>
cudaError_t launch_round_rows(const RoundRowsParams<T>& params, cudaStream_t stream);

}  // namespace htree::tree_attention
