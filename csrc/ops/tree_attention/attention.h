// Contract of the whole operator: its checks and outputs. docs/semantics/tree_attention.md §1.5,
// §1.8, §1.10, §1.12, §1.13.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "ops/tree/options.h"
#include "ops/tree/tree_checks.h"
#include "ops/tree_attention/packed_options.h"

namespace htree::tree_attention {

// (out [B, T_q, H, V], gmax [B, T_q, H], gsum [B, T_q, H], parents: an int32 [B, ceil(T_q / s), H_kv,
// k] for each layer)
using AttentionState = std::tuple<Tensor, Tensor, Tensor, std::vector<Tensor>>;
// The same with the lists of all layers in one tensor, see all_lists_shape(). The lists of a layer start at any multiple of
// 4 bytes, as every row of odd k does: kernels read and write entries one by one.
using AttentionRows = std::tuple<Tensor, Tensor, Tensor, Tensor>;
// (out [B, T_q, H, V], lse [B, T_q, H])
using AttentionLse = std::tuple<Tensor, Tensor>;
using OptionalTensor = std::optional<Tensor>;
using Gradients = std::tuple<Tensor, Tensor, Tensor>;

// The gradients of attention over given lists, as an op that autograd calls.
using RowsBackwardOp = PackedOp<Gradients(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& gmax,
    const Tensor& gsum, const Tensor& lists, const OptionalTensor& dout, const OptionalTensor& dlse,
    c10::SymIntArrayRef starts, std::array<bool, 3> output_mask)>;
inline const RowsBackwardOp& attention_rows_backward_op() {
  static const RowsBackwardOp op("htree::_attention_rows_backward");
  return op;
}

// The token of the first query where the queries are the last tokens (§1.13).
inline SymInt suffix_start(const Tensor& q, const Tensor& k) {
  return k.sym_size(1) - q.sym_size(1);
}

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

// The same as an expression that compares nothing, 1 + [T > M] + [T > M r] + ... up to the largest T that int32
// numbers: what is allocated by it has one graph for lengths of any depth.
inline SymInt symbolic_depth(const SymInt& num_tokens, const TreeOptions& options) {
  SymInt layers = 1;
  for (int64_t bound = options.max_top_nodes; bound < kIndexLimit; bound *= options.compression_rate) {
    layers = layers + (num_tokens - bound).max(0).min(1);
  }
  return layers;
}

// One frequency for each pair of the K dims of a key.
inline void check_frequencies(const char* op, const TreeOptions& options, const SymInt& key_dim) {
  if (options.inv_freq.has_value()) {
    const auto count = static_cast<int64_t>(options.inv_freq->size());
    TORCH_CHECK_VALUE(same_size(key_dim, 2 * count), op, ": inv_freq must have K/2 numbers, got ", count,
                      " and K = ", key_dim);
  }
}

// q [B, T_q, H, K] against k [B, T, H_kv, K] and v [B, T, H_kv, V]. q is as many equal pieces as there are `starts`,
// one behind the other; the first row of piece p stands at token starts[p].
inline void check_attention_rows(const char* op, const Tensor& q, const Tensor& k, const Tensor& v,
                                 c10::SymIntArrayRef starts, const TreeOptions& options) {
  check_options(op, options);
  check_queries(op, q, "k", k);
  check_values(op, "k", k, "v", v);
  check_frequencies(op, options, k.sym_size(3));
  const int64_t stride = options.selection_stride, num_pieces = static_cast<int64_t>(starts.size());
  TORCH_CHECK_VALUE(num_pieces > 0, op, ": starts must have the token of a first query, got none");
  TORCH_CHECK_VALUE(num_pieces == 1 || same_size(q.sym_size(1) % (num_pieces * stride), 0), op, ": the ",
                    num_pieces,
                    " pieces of q must have as many rows each, a multiple of selection_stride = ", stride,
                    ", got T_q = ", q.sym_size(1));
  const SymInt piece = q.sym_size(1) / num_pieces;
  for (const SymInt& start : starts) {
    TORCH_CHECK_VALUE(holds(start.sym_ge(0)) && holds((start + piece).sym_le(k.sym_size(1))), op,
                      ": starts must lie between 0 and T less the rows of a piece, got ", start, ", ", piece,
                      " rows and T = ", k.sym_size(1));
    TORCH_CHECK_VALUE(stride == 1 || same_size(start % stride, 0), op,
                      ": starts must be multiples of selection_stride = ", stride, ", got ", start);
  }
}

// The same for queries that are the last T_q tokens.
inline void check_attention(const char* op, const Tensor& q, const Tensor& k, const Tensor& v,
                            const TreeOptions& options) {
  check_options(op, options);
  check_queries(op, q, "k", k);
  check_values(op, "k", k, "v", v);
  check_frequencies(op, options, k.sym_size(3));
  const SymInt before = k.sym_size(1) - q.sym_size(1);
  TORCH_CHECK_VALUE(
      holds(before.sym_ge(0)), op, ": q must have at most as many rows as k (q is a suffix of the keys), ",
      "got T_q = ", q.sym_size(1), " and T = ", k.sym_size(1), " in ", q.sym_sizes(), " and ", k.sym_sizes());
  TORCH_CHECK_VALUE(options.selection_stride == 1 || same_size(before % options.selection_stride, 0), op,
                    ": T - T_q must be a multiple of selection_stride = ", options.selection_stride,
                    ", got T = ", k.sym_size(1), " and T_q = ", q.sym_size(1),
                    ": give the queries since the last multiple once more, or decode with a TreeKVCache");
}

// k, cut down to what `tokens` tokens can use, so that memory follows the length: no list is longer than the number of
// parents. A k that is too large for the tensor cores stays so: which kernels run follows from the options alone.
SymInt list_width(const SymInt& tokens, const TreeOptions& options);

// The options as the kernels take them. With lists given, of `parents` [B, rows, H_kv, width] each, these are read or
// written; otherwise lists have list_width(). r is cut down too: a node of r >= T children is a node of T.
AttentionArgs resolve_options(const char* op, const TreeOptions& options, const Tensor& k,
                              c10::SymIntArrayRef starts, at::TensorList parents);

inline std::vector<SymInt> list_shape(const Tensor& q, const Tensor& k, const TreeOptions& options) {
  return {q.sym_size(0), list_rows(q.sym_size(1), options.selection_stride), k.sym_size(2), options.top_k};
}

// The shape of out, whose state has one dim less; q and v are batches or packed.
inline std::vector<SymInt> result_shape(const Tensor& q, const Tensor& v) {
  std::vector<SymInt> shape = q.sym_sizes().vec();
  shape.back() = v.sym_size(-1);
  return shape;
}

// out, gmax and gsum, uninitialised.
inline std::tuple<Tensor, Tensor, Tensor> new_results(const Tensor& q, const Tensor& v) {
  const auto rows = q.sym_sizes().slice(0, q.dim() - 1);
  return {new_tensor(result_shape(q, v), q.scalar_type(), q), new_tensor(rows, state_dtype(q), q),
          new_tensor(rows, state_dtype(q), q)};
}

// Returns uninitialised tensors; lists only if they are stored.
inline AttentionState prepare_attention_forward(const char* op, const Tensor& q, const Tensor& k,
                                                const Tensor& v, const TreeOptions& options,
                                                bool store_parents) {
  check_attention(op, q, k, v, options);
  std::vector<Tensor> parents;
  for (int64_t layer = 0; store_parents && layer < depth_of(k.sym_size(1), options); ++layer) {
    parents.push_back(new_tensor(list_shape(q, k, options), at::kInt, q));
  }
  return std::tuple_cat(new_results(q, v), std::make_tuple(std::move(parents)));
}

// The lists of all layers in one tensor [B, rows, H_kv, list_width()]: with n = ceil(T_q / s), layer l has the rows l n ...
// (l + 1) n - 1. No rows where lists are not stored, else at least 2, of which those behind the lists are -1: tracing
// asks of every size whether it is 1, and where it may be and may not be, the answer would bind a graph to some lengths.
inline std::vector<SymInt> all_lists_shape(const Tensor& q, const Tensor& k, const TreeOptions& options,
                                           bool stored) {
  std::vector<SymInt> shape = list_shape(q, k, options);
  shape[3] = list_width(k.sym_size(1), options);
  shape[1] = stored ? (symbolic_depth(k.sym_size(1), options) * shape[1]).max(2) : SymInt(0);
  return shape;
}

// The lists of each layer [B, ceil(T_q / s), H_kv, list_width()] in the tensor of all of them; none where it has no rows. Sizes must
// be real.
std::vector<Tensor> lists_of_layers(const Tensor& lists, const Tensor& q, const Tensor& k,
                                    const TreeOptions& options);

inline AttentionRows prepare_attention_rows(const Tensor& q, const Tensor& k, const Tensor& v,
                                            c10::SymIntArrayRef starts, const TreeOptions& options,
                                            bool store_parents) {
  check_attention_rows("attention_rows", q, k, v, starts, options);
  const Tensor lists = new_tensor(all_lists_shape(q, k, options, store_parents), at::kInt, q);
  return std::tuple_cat(new_results(q, v), std::make_tuple(lists));
}

// The log-sum-exp of the scores of each row, natural logarithm, in the dtype of the states.
inline Tensor log_sum_exp(const Tensor& gmax, const Tensor& gsum) {
  return gmax.add(gsum.log());
}

// What a forward of q or packed queries, called `q_name`, gave, and the gradients of out and lse, of which one may be missing.
inline void check_results(const char* op, const char* q_name, const OptionalTensor& dout,
                          const OptionalTensor& dlse, const Tensor& q, const Tensor& v, const Tensor& out,
                          const Tensor& gmax, const Tensor& gsum) {
  TORCH_CHECK_VALUE(dout.has_value() || dlse.has_value(), op,
                    ": dout or dlse must be given, got None for both");
  const std::vector<SymInt> shape = result_shape(q, v);
  const std::string rows = q.dim() == 4 ? "[B, T_q, H" : "[N, H";
  const auto check_one = [&](const char* name, const Tensor& tensor, bool of_out) {
    check_dtype(op, name, tensor, {of_out ? q.scalar_type() : state_dtype(q)});
    check_same_device(op, name, tensor, q_name, q);
    check_shape(op, name, tensor, c10::SymIntArrayRef(shape).slice(0, q.dim() - (of_out ? 0 : 1)),
                (rows + (of_out ? ", V]" : "]")).c_str());
  };
  if (dout.has_value()) check_one("dout", *dout, true);
  if (dlse.has_value()) check_one("dlse", *dlse, false);
  check_one("out", out, true);
  check_one("gmax", gmax, false);
  check_one("gsum", gsum, false);
}

// The gradient of the output, or zeros: of a query's heads, read by every query.
inline Tensor given_or_zeros(const OptionalTensor& dout, const Tensor& out) {
  return dout.has_value() ? *dout : out.new_zeros(out.sizes().slice(out.dim() - 2)).expand(out.sizes());
}

// Returns uninitialised dq, dk, dv with the shapes and dtype of q, k, v; undefined
// where `output_mask` is false.
inline Gradients new_gradients(const Tensor& q, const Tensor& k, const Tensor& v,
                               const std::array<bool, 3>& output_mask) {
  return {new_gradient(output_mask[0], q), new_gradient(output_mask[1], k), new_gradient(output_mask[2], v)};
}

inline Gradients prepare_attention_backward(const Tensor& dout, const Tensor& q, const Tensor& k,
                                            const Tensor& v, const Tensor& out, const Tensor& gmax,
                                            const Tensor& gsum, at::TensorList parents,
                                            const TreeOptions& options,
                                            const std::array<bool, 3>& output_mask) {
  constexpr const char* kOp = "attention_backward";
  check_attention(kOp, q, k, v, options);
  check_results(kOp, "q", dout, /*dlse=*/std::nullopt, q, v, out, gmax, gsum);
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
  return new_gradients(q, k, v, output_mask);
}

inline Gradients prepare_attention_rows_backward(const OptionalTensor& dout, const OptionalTensor& dlse,
                                                 const Tensor& q, const Tensor& k, const Tensor& v,
                                                 const Tensor& out, const Tensor& gmax, const Tensor& gsum,
                                                 const Tensor& lists, c10::SymIntArrayRef starts,
                                                 const TreeOptions& options,
                                                 const std::array<bool, 3>& output_mask) {
  constexpr const char* kOp = "attention_rows_backward";
  check_attention_rows(kOp, q, k, v, starts, options);
  check_results(kOp, "q", dout, dlse, q, v, out, gmax, gsum);
  const bool stored = lists.dim() > 1 && lists.sym_size(1) != 0;
  check_indices(kOp, "lists", lists, all_lists_shape(q, k, options, stored),
                "[B, 0 or max(2, layers * ceil(T_q / selection_stride)), H_kv, width]", "q", q);
  return new_gradients(q, k, v, output_mask);
}

}  // namespace htree::tree_attention
