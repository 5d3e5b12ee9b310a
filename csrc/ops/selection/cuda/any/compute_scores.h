// The scores of every candidate of every query. docs/semantics/tree_attention.md §1.3, §1.4
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include "ops/tree/cuda/any/geometry.h"

namespace htree::tree_attention {

template <typename T>
struct ScoresParams {
  Geometry geometry;
  View<const T> q;                    // [B, T_q, S * G, K]
  View<const T> keys;                 // [B, N, H_kv, K]
  View<const int32_t> parents;        // [B, ceil(T_q / queries_per_list), S, list_width]
  RotaryTable<float> table;           // at least capacity() rows
  float* scores = nullptr;            // [B, T_q, S, capacity, G] contiguous
  int32_t* num_candidates = nullptr;  // [B, T_q, S] contiguous
  int64_t key_dim = 0;                // K, even
  float scale = 1.0f;
  bool fill_tail = true;  // false: entries p >= n stay unwritten, because our own readers do not look there
};

// T is float, __half or __nv_bfloat16; Work is FullWork or IoOnly (docs/semantics/io_only.md §2.2). The sum
// over K runs in index order whatever the launch shape.
template <typename Work, typename T>
cudaError_t launch_compute_scores(const ScoresParams<T>& params, cudaStream_t stream);

// Writes for each candidate before the rightmost one the log-sum-exp of the scores of its span means, and
// -inf for the others. docs/semantics/tree_attention.md §1.15
template <typename T>
struct ComputeSpanScoresParams {
  ScoresParams<T> row;         // its keys are the means [B, num_means, H_kv, K]; fill_tail is not read
  int64_t means_per_node = 1;  // node i has the means from i * means_per_node on
  int64_t num_means = 0;
  int64_t top_k = 0;  // rows with no more candidates get no scores: all are selected
};

// T is float, __half or __nv_bfloat16.
template <typename T>
cudaError_t launch_compute_span_scores(const ComputeSpanScoresParams<T>& params, cudaStream_t stream);

}  // namespace htree::tree_attention
