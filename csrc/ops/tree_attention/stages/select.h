// The contract of the selection ops and of top_parents: every check and every output.
// docs/semantics/tree_attention.md §1.3, §1.6, §1.8
#pragma once

#include "host/overlap.h"
#include "ops/tree/tree_checks.h"

namespace htree::tree_attention {

// scores [B, T_q, H_kv, k*r, G] in a state dtype; neither of the last two sizes is zero.
inline void check_scores(const char* op, const Tensor& scores) {
  check_rank(op, "scores", scores, 5, "[B, T_q, H_kv, k*r, G]");
  check_state_dtype(op, "scores", scores);
  TORCH_CHECK_VALUE(holds(scores.sym_size(3).sym_ge(1)) && holds(scores.sym_size(4).sym_ge(1)), op,
                    ": the last two sizes of scores must be at least 1, got ", scores.sym_sizes());
}

inline void check_num_candidates(const char* op, const Tensor& num_candidates, const Tensor& scores) {
  check_indices(op, "num_candidates", num_candidates, scores.sym_sizes().slice(0, 3),
                "[B, T_q, H_kv] of scores", "scores", scores);
}

// Returns topk_positions int32 [B, T_q, H_kv, top_k], uninitialised.
inline Tensor prepare_positions(const char* op, const Tensor& scores, const Tensor& num_candidates,
                                int64_t top_k) {
  check_scores(op, scores);
  check_num_candidates(op, num_candidates, scores);
  check_list_width(op, "top_k", top_k, /*compression_rate=*/1);
  return new_tensor({scores.sym_size(0), scores.sym_size(1), scores.sym_size(2), top_k}, at::kInt, scores);
}

// The argument `select` of the IO-only variant, docs/semantics/io_only.md §2.3: true for "stratified", false for "lcg".
inline bool parse_io_select(const char* op, std::string_view select) {
  TORCH_CHECK_VALUE(select == "lcg" || select == "stratified", op,
                    ": select must be \"lcg\" or \"stratified\", got \"", select, "\"");
  return select == "stratified";
}

inline Tensor prepare_io_select_topk(const Tensor& scores, const Tensor& num_candidates, int64_t top_k,
                                     int64_t layer, std::string_view select, const SymInt& t0) {
  constexpr const char* kOp = "io_select_topk";
  check_at_least(kOp, "layer", layer, 0);
  TORCH_CHECK_VALUE(holds(t0.sym_ge(0)), kOp, ": t0 must be at least 0, got ", t0);
  parse_io_select(kOp, select);
  Tensor positions = prepare_positions(kOp, scores, num_candidates, top_k);
  const SymInt limit = int64_t{1} << 31;
  TORCH_CHECK_VALUE(holds(t0.sym_lt(limit)) && holds(scores.sym_size(1).sym_lt(limit - t0)), kOp,
                    ": t0 + T_q must be below 2^31, got t0 = ", t0, " and T_q = ", scores.sym_size(1));
  return positions;
}

inline void prepare_mask_topk_scores(const Tensor& scores, const Tensor& topk_positions) {
  constexpr const char* kOp = "mask_topk_scores_";
  check_scores(kOp, scores);
  check_rank(kOp, "topk_positions", topk_positions, 4, "[B, T_q, H_kv, k]");
  check_indices(kOp, "topk_positions", topk_positions,
                {scores.sym_size(0), scores.sym_size(1), scores.sym_size(2), topk_positions.sym_size(3)},
                "[B, T_q, H_kv] of scores, then k", "scores", scores);
  check_writable(kOp, "scores", scores);
  check_disjoint(kOp, "scores", scores, "topk_positions", topk_positions);
}

// Returns next_parents int32 in the shape of topk_positions, uninitialised.
inline Tensor prepare_compute_next_parents(const Tensor& parents, const Tensor& topk_positions,
                                           int64_t compression_rate,
                                           const char* op = "compute_next_parents") {
  check_rate(op, compression_rate);
  check_rank(op, "parents", parents, 4, "[B, T_q, H_kv, k]");
  check_dtype(op, "parents", parents, {at::kInt});
  TORCH_CHECK_VALUE(holds(parents.sym_size(3).sym_ge(1)), op,
                    ": k, the last size of parents, must be at least 1, got ", parents.sym_sizes());
  check_rank(op, "topk_positions", topk_positions, 4, "[B, T_q, H_kv, k]");
  check_indices(op, "topk_positions", topk_positions,
                {parents.sym_size(0), parents.sym_size(1), parents.sym_size(2), topk_positions.sym_size(3)},
                "[B, T_q, H_kv] of parents, then k", "parents", parents);
  return new_tensor(topk_positions.sym_sizes(), at::kInt, parents);
}

inline void check_top_parents(const SymInt& batch, const SymInt& queries, const SymInt& heads, int64_t top_k,
                              int64_t num_layers, int64_t compression_rate, const SymInt& t0,
                              int64_t selection_stride) {
  constexpr const char* kOp = "top_parents";
  TORCH_CHECK_VALUE(holds(batch.sym_ge(0)) && holds(queries.sym_ge(0)) && holds(heads.sym_ge(0)), kOp,
                    ": B, T and heads must be at least 0, got ", batch, ", ", queries, " and ", heads);
  check_at_least(kOp, "num_layers", num_layers, 1);
  check_position(kOp, num_layers - 1, compression_rate, t0, selection_stride);
  check_list_width(kOp, "top_k", top_k, compression_rate);
  const int64_t span = node_span(compression_rate, num_layers);
  if (span < (int64_t{1} << 62) / top_k) {
    TORCH_CHECK_VALUE(holds((t0 + queries).sym_le(span * top_k)), kOp, ": top_k = ", top_k,
                      " lists of num_layers = ", num_layers, " with compression_rate = ", compression_rate,
                      " reach ", span * top_k, " tokens, got t0 + T = ", t0 + queries);
  }
}

}  // namespace htree::tree_attention
