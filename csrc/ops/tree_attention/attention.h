// Contract of the whole operator: its checks and outputs. docs/semantics/tree_attention.md §1.5,
// §1.8, §1.10, §1.12, §1.13.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "ops/tree_attention/checks.h"
#include "ops/tree_attention/tree_options.h"

namespace htree::tree_attention {

// (out [B, T_q, H, V], gmax [B, T_q, H], gsum [B, T_q, H], parents: an int32 [B, ceil(T_q / s), H_kv,
// k] for each layer)
using AttentionState = std::tuple<Tensor, Tensor, Tensor, std::vector<Tensor>>;
using Gradients = std::tuple<Tensor, Tensor, Tensor>;

// L of §1.2. ceil(T / r^l) > M means T > M * r^l, so a symbolic T is compared with one bound per layer and
// with nothing else. Code that was compiled for one length therefore serves all lengths of the same depth.
inline int64_t depth_of(const SymInt& num_tokens, const TreeOptions& options) {
  constexpr int64_t kMost = int64_t{1} << 62;
  int64_t layers = 1;
  int64_t bound = options.max_top_nodes;
  while (num_tokens.sym_gt(bound).guard_bool(__FILE__, __LINE__)) {
    ++layers;
    bound = bound > kMost / options.compression_rate ? kMost : bound * options.compression_rate;
  }
  return layers;
}

inline void check_options(const char* op, const TreeOptions& options) {
  check_rate(op, options.compression_rate);
  check_list_width(op, "top_k", options.top_k, options.compression_rate);
  const int64_t most = options.top_k * options.compression_rate;
  TORCH_CHECK_VALUE(options.max_top_nodes >= 1 && options.max_top_nodes <= most, op,
                    ": max_top_nodes must be at least 1 and at most top_k * compression_rate = ", most,
                    ", got ", options.max_top_nodes);
  check_selection_stride(op, options.selection_stride, options.compression_rate);
  check_scale(op, options.scale);
  check_selection_span(op, options.selection_span, options.compression_rate,
                       parse_importance(op, options.importance));
  if (options.rope_base.has_value()) {
    TORCH_CHECK_VALUE(std::isfinite(static_cast<float>(*options.rope_base)) && *options.rope_base > 0, op,
                      ": rope_base must be positive and finite in float32, or None for no rotation, got ",
                      *options.rope_base);
  }
}

// q [B, T_q, H, K] against k [B, T, H_kv, K] and v [B, T, H_kv, V]; row i of q stands at token T - T_q + i.
inline void check_attention(const char* op, const Tensor& q, const Tensor& k, const Tensor& v,
                            const TreeOptions& options) {
  check_options(op, options);
  check_queries(op, q, "k", k);
  check_values(op, "k", k, "v", v);
  const SymInt before = k.sym_size(1) - q.sym_size(1);
  TORCH_CHECK_VALUE(
      holds(before.sym_ge(0)), op, ": q must have at most as many rows as k (q is a suffix of the keys), ",
      "got T_q = ", q.sym_size(1), " and T = ", k.sym_size(1), " in ", q.sym_sizes(), " and ", k.sym_sizes());
  TORCH_CHECK_VALUE(options.selection_stride == 1 || same_size(before % options.selection_stride, 0), op,
                    ": T - T_q must be a multiple of selection_stride = ", options.selection_stride,
                    ", got T = ", k.sym_size(1), " and T_q = ", q.sym_size(1),
                    ": give the queries since the last multiple once more, or decode with a TreeKVCache");
}

inline std::vector<SymInt> list_shape(const Tensor& q, const Tensor& k, const TreeOptions& options) {
  return {q.sym_size(0), list_rows(q.sym_size(1), options.selection_stride), k.sym_size(2), options.top_k};
}

// Returns uninitialised tensors; lists only if they are stored.
inline AttentionState prepare_attention_forward(const char* op, const Tensor& q, const Tensor& k,
                                                const Tensor& v, const TreeOptions& options,
                                                bool store_parents) {
  check_attention(op, q, k, v, options);
  const std::array<SymInt, 3> rows = {q.sym_size(0), q.sym_size(1), q.sym_size(2)};
  std::vector<Tensor> parents;
  for (int64_t layer = 0; store_parents && layer < depth_of(k.sym_size(1), options); ++layer) {
    parents.push_back(new_tensor(list_shape(q, k, options), at::kInt, q));
  }
  return {new_tensor({rows[0], rows[1], rows[2], v.sym_size(3)}, q.scalar_type(), q),
          new_tensor(rows, state_dtype(q), q), new_tensor(rows, state_dtype(q), q), std::move(parents)};
}

// Returns uninitialised dq, dk, dv with the shapes and dtype of q, k, v; undefined
// where `output_mask` is false.
inline Gradients prepare_attention_backward(const Tensor& dout, const Tensor& q, const Tensor& k,
                                            const Tensor& v, const Tensor& out, const Tensor& gmax,
                                            const Tensor& gsum, at::TensorList parents,
                                            const TreeOptions& options,
                                            const std::array<bool, 3>& output_mask) {
  constexpr const char* kOp = "attention_backward";
  check_attention(kOp, q, k, v, options);
  const std::array<SymInt, 4> shape = {q.sym_size(0), q.sym_size(1), q.sym_size(2), v.sym_size(3)};
  const auto check_one = [&](const char* name, const Tensor& tensor, at::ScalarType dtype, int64_t rank) {
    check_dtype(kOp, name, tensor, {dtype});
    check_same_device(kOp, name, tensor, "q", q);
    check_shape(kOp, name, tensor, c10::SymIntArrayRef(shape).slice(0, rank),
                rank == 4 ? "[B, T_q, H, V]" : "[B, T_q, H]");
  };
  check_one("dout", dout, q.scalar_type(), 4);
  check_one("out", out, q.scalar_type(), 4);
  check_one("gmax", gmax, state_dtype(q), 3);
  check_one("gsum", gsum, state_dtype(q), 3);
  if (!parents.empty()) {
    const int64_t depth = depth_of(k.sym_size(1), options);
    TORCH_CHECK_VALUE(static_cast<int64_t>(parents.size()) == depth, kOp,
                      ": parents must have one list per layer of the tree (", depth, ") or be empty, got ",
                      parents.size());
  }
  for (size_t layer = 0; layer < parents.size(); ++layer) {
    check_indices(kOp, ("parents[" + std::to_string(layer) + "]").c_str(), parents[layer],
                  list_shape(q, k, options), "[B, ceil(T_q / selection_stride), H_kv, top_k]", "q", q);
  }
  const auto gradient = [&](bool wanted, const Tensor& like) {
    return wanted ? new_tensor(like.sym_sizes(), like.scalar_type(), like) : Tensor();
  };
  return {gradient(output_mask[0], q), gradient(output_mask[1], k), gradient(output_mask[2], v)};
}

}  // namespace htree::tree_attention
