// Half-split rotation at given positions. docs/semantics/tree_attention.md §1.4
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <type_traits>

#include "ops/tree/cuda/any/geometry.h"

namespace htree::tree_attention {

// TableT is float, or double where x is double. A position outside the table is clamped to its ends.
template <typename T, typename TableT>
struct RopeParams {
  View<const T> x;   // [B, T, H, D]
  T* out = nullptr;  // [B, T, H, D] contiguous
  RotaryTable<TableT> table;
  int64_t table_size = 0;
  const void* positions = nullptr;  // [B, T], int64 where wide_positions holds, else int32
  bool wide_positions = false;
  int64_t position_batch = 0;  // strides in elements; 0 where all batches share one row
  int64_t position_row = 1;
  int64_t num_batches = 0;
  int64_t num_rows = 0;
  int64_t num_heads = 0;
  int64_t width = 0;  // D, even
  bool inverse = false;
};

// (T, TableT) is (float, float), (__half, float), (__nv_bfloat16, float) or (double, double).
template <typename T, typename TableT>
cudaError_t launch_rope(const RopeParams<T, TableT>& params, cudaStream_t stream);

}  // namespace htree::tree_attention
