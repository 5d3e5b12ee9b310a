// Contract of compute_scores: every check and every output. docs/semantics/tree_attention.md §1.3, §1.4,
// §1.8.
#pragma once

#include "ops/tree_attention/checks.h"

namespace htree::tree_attention {

// Of compute_scores and of its IO-only twin. Returns (scores [B, T_q, H_kv, k*r, G] in the state dtype,
// num_candidates int32 [B, T_q, H_kv]), uninitialised.
inline std::tuple<Tensor, Tensor> prepare_compute_scores(const Tensor& q, const Tensor& layer_k,
                                                         const Tensor& parents, const Tensor& cos,
                                                         const Tensor& sin, int64_t layer,
                                                         int64_t compression_rate,
                                                         std::optional<double> scale, const SymInt& t0,
                                                         const char* op = "compute_scores") {
  check_position(op, layer, compression_rate, t0);
  check_scale(op, scale);
  check_queries(op, q, "layer_k", layer_k);
  const SymInt kv_heads = layer_k.sym_size(2);
  check_parents(op, parents, q, kv_heads, compression_rate);
  const SymInt capacity = parents.sym_size(3) * compression_rate;
  check_cache(op, cos, sin, q, capacity);
  return {new_tensor({q.sym_size(0), q.sym_size(1), kv_heads, capacity, q.sym_size(2) / kv_heads},
                     state_dtype(q), q),
          new_tensor({q.sym_size(0), q.sym_size(1), kv_heads}, at::kInt, q)};
}

}  // namespace htree::tree_attention
