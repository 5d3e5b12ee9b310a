// Contract of the ops that gather the children of a layer's parents: every check and every output.
// docs/semantics/tree_attention.md §1.3, §1.7, §1.8.
#pragma once

#include <array>

#include "ops/tree_attention/stages/select/select.h"

namespace htree::tree_attention {

// (lmax [B, T_q, H], lsum [B, T_q, H], lout [B, T_q, H, V]) and what comes with them.
using State = std::tuple<Tensor, Tensor, Tensor>;
using StateAndParents = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using StateAndTopk = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

// Every tensor of an op that scores a layer's candidates; `layer_v` is undefined where none is read.
struct LayerTensors {
  const Tensor& q;        // [B, T_q, H, K]
  const Tensor& layer_k;  // [B, N, H_kv, K]
  const Tensor& layer_v;  // [B, N, H_kv, V]
  const Tensor& parents;  // int32 [B, ceil(T_q / s), H_kv or H, k]
  const Tensor& cos;      // [size, K/2], size at least k*r
  const Tensor& sin;      // as cos
};

struct LayerOptions {
  int64_t layer;
  int64_t compression_rate;
  std::optional<double> scale;
  const SymInt& t0;
  int64_t selection_stride = 1;
};

// Lists are shared by the G heads of a group, or belong to one query head each.
inline void check_layer(const char* op, const LayerTensors& in, const LayerOptions& options,
                        bool list_per_query_head = false) {
  check_position(op, options.layer, options.compression_rate, options.t0, options.selection_stride);
  check_scale(op, options.scale);
  check_queries(op, in.q, "layer_k", in.layer_k);
  if (in.layer_v.defined()) {
    check_values(op, "layer_k", in.layer_k, "layer_v", in.layer_v);
  }
  const SymInt list_heads = (list_per_query_head ? in.q : in.layer_k).sym_size(2);
  check_parents(op, in.parents, in.q, list_heads, options.compression_rate, options.selection_stride);
  check_cache(op, in.cos, in.sin, in.q, in.parents.sym_size(3) * options.compression_rate);
}

inline void check_above_bottom(const char* op, int64_t layer) {
  TORCH_CHECK_VALUE(layer > 0, op, ": layer must be above the bottom (at least 1), got ", layer);
}

inline State new_layer_state(const LayerTensors& in) {
  return new_state(in.q.sym_size(0), in.q.sym_size(1), in.q.sym_size(2), in.layer_v.sym_size(3), in.q);
}

// int32 [B, ceil(T_q / s), H_kv, top_k], uninitialised.
inline Tensor new_lists(const LayerTensors& in, int64_t top_k) {
  return new_tensor({in.q.sym_size(0), in.parents.sym_size(1), in.layer_k.sym_size(2), top_k}, at::kInt,
                    in.q);
}

inline State prepare_accumulate_non_topk(const Tensor& layer_v, const Tensor& parents, const Tensor& scores,
                                         const Tensor& num_candidates, int64_t layer,
                                         int64_t compression_rate, const SymInt& t0, const char* op) {
  check_position(op, layer, compression_rate, t0);
  check_scores(op, scores);
  check_rank(op, "layer_v", layer_v, 4, "[B, N, H_kv, V]");
  check_floating(op, "layer_v", layer_v, /*double_on_cuda=*/false);
  check_dtype(op, "scores", scores, {state_dtype(layer_v)});
  check_same_device(op, "scores", scores, "layer_v", layer_v);
  check_size(op, "layer_v", layer_v, 0, scores.sym_size(0), "B of scores");
  check_size(op, "layer_v", layer_v, 2, scores.sym_size(2), "H_kv of scores");
  TORCH_CHECK_VALUE(holds(layer_v.sym_size(3).sym_ge(1)), op,
                    ": V, the last size of layer_v, must be at least 1, ", "got ", layer_v.sym_sizes());
  check_num_candidates(op, num_candidates, scores);
  check_parents(op, parents, scores, scores.sym_size(2), compression_rate);
  check_size(op, "scores", scores, 3, parents.sym_size(3) * compression_rate,
             "k of parents times compression_rate");
  return new_state(scores.sym_size(0), scores.sym_size(1), scores.sym_size(2) * scores.sym_size(4),
                   layer_v.sym_size(3), layer_v);
}

inline StateAndTopk prepare_compute_and_select(const LayerTensors& in, const LayerOptions& options,
                                               int64_t top_k) {
  constexpr const char* kOp = "compute_and_select";
  check_layer(kOp, in, options, /*list_per_query_head=*/true);
  check_list_width(kOp, "top_k", top_k, options.compression_rate);
  auto [lmax, lsum, lout] = new_layer_state(in);
  const int64_t width = options.layer == 0 ? 0 : top_k;
  const std::array<SymInt, 4> shape = {in.q.sym_size(0), in.q.sym_size(1), in.q.sym_size(2), width};
  return {lmax, lsum, lout, new_tensor(shape, at::kInt, in.q), new_tensor(shape, state_dtype(in.q), in.q)};
}

inline StateAndParents prepare_select_accumulate(const LayerTensors& in, const LayerOptions& options,
                                                 int64_t top_k, std::string_view importance) {
  constexpr const char* kOp = "select_accumulate";
  check_layer(kOp, in, options);
  check_above_bottom(kOp, options.layer);
  check_list_width(kOp, "top_k", top_k, options.compression_rate);
  parse_importance(kOp, importance);
  auto [lmax, lsum, lout] = new_layer_state(in);
  return {lmax, lsum, lout, new_lists(in, top_k)};
}

inline State prepare_bottom_accumulate(const LayerTensors& in, const LayerOptions& options) {
  constexpr const char* kOp = "bottom_accumulate";
  check_layer(kOp, in, options);
  return new_layer_state(in);
}

inline Tensor prepare_recompute_selection(const LayerTensors& in, const LayerOptions& options, int64_t top_k,
                                          std::string_view importance) {
  constexpr const char* kOp = "recompute_selection";
  check_layer(kOp, in, options);
  check_above_bottom(kOp, options.layer);
  check_list_width(kOp, "top_k", top_k, options.compression_rate);
  parse_importance(kOp, importance);
  return new_lists(in, top_k);
}

}  // namespace htree::tree_attention
