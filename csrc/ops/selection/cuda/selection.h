// The steps of a selection: scores or importances of the leaders, then the choice. No torch.
#pragma once

#include "ops/tree/cuda/copies.h"
#include "ops/tree/cuda/launch_params.h"

namespace htree::tree_attention {

// Scores of a dense top by span means, see span_scores.cuh. The importance of node p is the sum over the
// heads g of sums[p] * 2^(references[p >> nodes_log2] - log-sum), where the head's log-sum is that of the
// pairs of all runs.
struct SpanScores {
  float* sums = nullptr;        // [B, num_lists, H_kv, G, width], for nodes p < n - 1
  float* references = nullptr;  // [B, num_lists, H_kv, num_groups, G]
  float2* runs = nullptr;       // [B, num_lists, H_kv, num_runs, G], pairs as in ListScoreParams::sums
  int64_t width = 0;            // a multiple of 128
  int num_groups = 0, num_runs = 0;
  SpanTiling tiling;
};

// The last step of a selection: docs/semantics/tree_attention.md §1.6.
struct LeaderSelectParams {
  GatherParams gather;            // of the layer that the scores belong to
  const float* scores = nullptr;  // as ListScoreParams, or importances [B, num_lists, H_kv, score_width]
  int64_t score_width = 0;
  const float2* sums = nullptr;  // as ListScoreParams; null where `scores` are importances
  int num_runs = 0;
  SpanScores spans;               // if it has sums, it replaces the scores
  int32_t* next_lists = nullptr;  // [B, num_lists, H_kv, list_width] node ids, ascending, -1 tail
  int64_t next_batch = 0;         // stride in elements
  uint32_t* selected =
      nullptr;  // [B, num_lists, H_kv, mask_words]: bit p = candidate p is selected; may be null
  int64_t selected_batch = 0;  // stride in words
  int64_t mask_words = 0;      // >= score_width / 32
  SelectionOptions selection;
};
cudaError_t launch_leader_select(const LeaderSelectParams& params, cudaStream_t stream);

// ---- scores of the leaders over the candidates of their lists

// Writes the scores of the leaders, and for every run of kRunSlots slots and every head
// (maximum, sum of 2^(s - maximum)) over the candidates before the rightmost one (for kLse over all n).
// Entries p >= n of a row are not written, nor are runs past its last slot.
struct ListScoreParams {
  GatherParams gather;
  SelectionOptions selection;
  float* scores = nullptr;  // [B, num_lists, H_kv, score_width, G]
  int64_t score_width = 0;  // >= the largest n of the chunk
  float2* sums = nullptr;   // [B, num_lists, H_kv, num_runs, G]
  int num_runs = 0;         // score_runs(score_width)
  PackedSpans spans;        // from the chunk's first batch on; launch_span_list_scores alone reads them
};
template <typename T, int kDim>
cudaError_t launch_list_scores(const ListScoreParams& params, cudaStream_t stream);
// The same with selection_span: the score of a node is the log-sum over its span means.
template <typename T, int kDim>
cudaError_t launch_span_list_scores(const ListScoreParams& params, cudaStream_t stream);

// ---- Selection at a dense top on Hopper (sm_90a): r = 16, fp16 or bf16 inputs, K = V in {32, 64, 128}, G in
// {1, 2, 4, 8, 16}. The candidates of a query are the nodes 0 ... n - 1 of the layer, so scores are dense
// products of warpgroups instead of a gather. Three launches over the leaders of a chunk make a selection:
// references (log-sums), importances, select.

// Writes the references, [num_batches, num_lists, H_kv, G] in log2 units, which the second launch subtracts
// from scores: the log-sum over the candidates before the query's diagonal block (for kLse with it), or +inf where
// that is -inf; for kExpJoint the maximum.
struct DenseReferenceParams {
  GatherParams gather;  // its blocks and lists are not read
  DenseTiles tiles;     // from the chunk's first batch on
  SelectionOptions selection;
  float* references = nullptr;
  int64_t reference_batch = 0;  // stride in elements
};
template <typename T, int kDim>
cudaError_t launch_dense_references(const DenseReferenceParams& params, cudaStream_t stream);

// importances[b, list, kv head, p] = sum over g in order of 2^(score - reference) for p < n - 1. Further
// entries of a row's last tile are unspecified.
struct DenseImportanceParams {
  DenseReferenceParams reference;
  float* importances = nullptr;  // [num_batches, num_lists, H_kv, width]
  int64_t width = 0;             // a multiple of 128, >= the largest n - 1 of the chunk
};
template <typename T, int kDim>
cudaError_t launch_dense_importances(const DenseImportanceParams& params, cudaStream_t stream);

// With selection_span one launch takes the place of both.
struct SpanScoreParams {
  GatherParams gather;  // its blocks and lists are not read
  SpanTiles tiles;      // from the chunk's first batch on
  SelectionOptions selection;
  SpanScores scores;
};
template <typename T, int kDim>
cudaError_t launch_span_scores(const SpanScoreParams& params, cudaStream_t stream);

}  // namespace htree::tree_attention
