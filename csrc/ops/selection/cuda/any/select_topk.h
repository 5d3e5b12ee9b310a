// Selection of the top k candidates, and the lists of the next layer. docs/semantics/tree_attention.md §1.6
#pragma once

#include <cuda_runtime_api.h>

#include "ops/tree/cuda/any/geometry.h"
#include "ops/tree/io_formulas.h"
#include "ops/tree/tree_args.h"

namespace htree::tree_attention {

// The order of the selected positions in their row.
enum class SelectionOrder { kByKey, kAscending };

struct SelectParams {
  // Row (b, i, list) reads scores at ((b * score_queries + i * query_step) * S + list) * capacity * G.
  const float* scores = nullptr;            // [B, score_queries, S, capacity, G] contiguous
  const int32_t* num_candidates = nullptr;  // [B, score_queries, S] contiguous
  int32_t* positions = nullptr;             // [B, num_queries, S, top_k] contiguous, -1 after the last
  int64_t num_batches = 0;
  int64_t score_queries = 0;
  int64_t num_queries = 0;  // ceil(score_queries / query_step)
  int64_t query_step = 1;
  int64_t num_lists = 0;
  int64_t capacity = 0;
  int64_t group = 1;
  int64_t top_k = 0;
  SelectionOptions selection;
  SelectionOrder order = SelectionOrder::kByKey;
  void* scratch = nullptr;  // select_scratch_bytes() of device memory; null where that is 0
  IoPositions io;           // read by the IO-only variant alone

  constexpr int64_t num_rows() const { return num_batches * num_queries * num_lists; }
};

// Device memory that the launch needs on the current device: 0 unless the keys of a row exceed shared memory.
int64_t select_scratch_bytes(const SelectParams& params);
// Work is FullWork or IoOnly (docs/semantics/io_only.md §2.2).
template <typename Work>
cudaError_t launch_select_topk(const SelectParams& params, cudaStream_t stream);

// Sets scores to -inf at the listed positions; positions outside [0, capacity) do nothing.
struct MaskParams {
  float* scores = nullptr;  // [B, T_q, S, capacity, G], strides in elements
  int64_t score_strides[5] = {};
  View<const int32_t> positions;  // [B, ceil(T_q / queries_per_list), S, top_k]
  int64_t num_batches = 0;
  int64_t num_queries = 0;
  int64_t queries_per_list = 1;
  int64_t num_lists = 0;
  int64_t capacity = 0;
  int64_t group = 1;
  int64_t top_k = 0;
};
cudaError_t launch_mask_topk_scores(const MaskParams& params, cudaStream_t stream);

// Maps positions to nodes, ascending, with -1 at the end. Where `parents.data` is null the entries are node
// ids already and are only sorted.
struct NextParentsParams {
  View<const int32_t> parents;    // [B, T_q, S, list_width]
  View<const int32_t> positions;  // [B, T_q, S, top_k]
  View<int32_t> next_parents;     // [B, T_q, S, top_k]
  int64_t num_batches = 0;
  int64_t num_queries = 0;
  int64_t num_lists = 0;
  int64_t list_width = 0;
  int64_t rate = 16;
  int64_t top_k = 0;
  void* scratch = nullptr;  // next_parents_scratch_bytes() of device memory; null where that is 0

  constexpr int64_t num_rows() const { return num_batches * num_queries * num_lists; }
};
int64_t next_parents_scratch_bytes(const NextParentsParams& params);
// Work is FullWork or IoOnly; the latter stores the positions themselves.
template <typename Work>
cudaError_t launch_compute_next_parents(const NextParentsParams& params, cudaStream_t stream);

// Nodes and scores at the chosen positions, for lists that belong to one query head.
struct PickParams {
  View<const int32_t> parents;         // [B, T_q, S, list_width]
  const float* scores = nullptr;       // [B, T_q, S, capacity] contiguous
  const int32_t* positions = nullptr;  // [B, T_q, S, top_k] contiguous
  View<int32_t> nodes;                 // [B, T_q, S, top_k], -1 where the position is -1
  View<float> node_scores;             // [B, T_q, S, top_k], -inf where the position is -1
  int64_t num_batches = 0;
  int64_t num_queries = 0;
  int64_t num_lists = 0;
  int64_t capacity = 0;
  int64_t rate = 16;
  int64_t top_k = 0;
};
cudaError_t launch_pick_topk(const PickParams& params, cudaStream_t stream);

}  // namespace htree::tree_attention
