// Argument checks and allocations that the stages share (docs/semantics/tree_attention.md §1.3, §1.8
// "Validation", §1.12, §1.13). All but resolve_layer work on symbolic sizes, so Meta runs the very same
// checks as CPU and CUDA.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <optional>
#include <string_view>
#include <tuple>

#include "host/check.h"
#include "host/outputs.h"
#include "ops/tree/tree_args.h"

namespace htree::tree_attention {

using at::Tensor;
using c10::SymInt;

// ---- options

// Positions and node numbers are int32.
constexpr int64_t kIndexLimit = int64_t{1} << 31;

Importance parse_importance(const char* op, std::string_view name);
void check_scale(const char* op, std::optional<double> scale);
void check_rate(const char* op, int64_t compression_rate);
// A list of `width` parents spans width * r candidate positions.
void check_list_width(const char* op, const char* name, int64_t width, int64_t compression_rate);
void check_selection_stride(const char* op, int64_t selection_stride, int64_t compression_rate);
// None, or a divisor of r, which importance "lse" does not take.
void check_selection_span(const char* op, std::optional<int64_t> selection_span, int64_t compression_rate,
                          Importance importance);
// `layer`, r, `t0` and s of an op that works on one layer.
void check_position(const char* op, int64_t layer, int64_t compression_rate, const SymInt& t0,
                    int64_t selection_stride = 1);

// Number of parent lists that `num_queries` queries have.
inline SymInt list_rows(const SymInt& num_queries, int64_t selection_stride) {
  return selection_stride == 1 ? num_queries : (num_queries + (selection_stride - 1)) / selection_stride;
}

// ---- tensors

// q [B, T_q, H, K] against keys [B, N, H_kv, K]: the same dtype, device, B and K; K is even and at least 2, H
// is a multiple of H_kv.
void check_queries(const char* op, const Tensor& q, const char* keys_name, const Tensor& keys);
// keys [B, N, H_kv, K] against values [B, N, H_kv, V], V at least 1.
void check_values(const char* op, const char* keys_name, const Tensor& keys, const char* values_name,
                  const Tensor& values);
// int32 with exactly this shape, which `meaning` spells in the letters of the documentation.
void check_indices(const char* op, const char* name, const Tensor& indices, c10::SymIntArrayRef shape,
                   const char* meaning, const char* like_name, const Tensor& like);
// parents int32 [B, ceil(T_q / s), heads, k], k at least 1.
void check_parents(const char* op, const Tensor& parents, const char* q_name, const Tensor& q,
                   const SymInt& heads, int64_t compression_rate, int64_t selection_stride = 1);
// cos and sin [size, K/2] in the state dtype of x, size at least `min_size`.
void check_cache(const char* op, const Tensor& cos, const Tensor& sin, const char* x_name, const Tensor& x,
                 const SymInt& min_size);
// A layer state: max and sum [B, T_q, H], out [B, T_q, H, V], all in `dtype`.
void check_state(const char* op, const char* const (&names)[3], const Tensor& max, const Tensor& sum,
                 const Tensor& out);
// d, the last size of the queries or keys of an index.
void check_index_width(const char* op, const char* name, const Tensor& x);
// float32, or float64 on the CPU: states and scores.
void check_state_dtype(const char* op, const char* name, const Tensor& tensor);

// ---- outputs

// States, scores and the rotation cache are fp64 for fp64 inputs, else fp32.
inline at::ScalarType state_dtype(const Tensor& like) {
  return like.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// Uninitialised max, sum [B, T_q, H] and out [B, T_q, H, V].
std::tuple<Tensor, Tensor, Tensor> new_state(const SymInt& batch, const SymInt& queries, const SymInt& heads,
                                             const SymInt& value_dim, const Tensor& like);

// ---- what the kernels are given

// The kernels read any strides whose last one is 1; other tensors are copied.
inline Tensor unit_last(const Tensor& x) {
  if (x.size(-1) != 1 && x.stride(-1) != 1) {
    return x.contiguous();
  }
  // On CUDA the width of the loads must follow from the shape alone, or the bits of a view would depend on
  // its place in memory. So a tensor whose rows lie off the 16-byte grid, where those of a contiguous one
  // would not, is copied.
  constexpr int64_t kAlignment = 16;
  const auto size = static_cast<int64_t>(x.element_size());
  if (!x.is_cuda() || x.size(-1) * size % kAlignment != 0) {
    return x;
  }
  bool aligned = reinterpret_cast<uintptr_t>(x.const_data_ptr()) % kAlignment == 0;
  for (int64_t dim = 0; dim + 1 < x.dim(); ++dim) {
    aligned = aligned && (x.size(dim) <= 1 || x.stride(dim) * size % kAlignment == 0);
  }
  return aligned ? x : x.clone(at::MemoryFormat::Contiguous);
}

inline double resolve_scale(std::optional<double> scale, int64_t key_dim) {
  return scale.has_value() ? *scale : 1.0 / std::sqrt(static_cast<double>(key_dim));
}

// The arguments of one layer as numbers; sizes must be real, not symbolic. `num_nodes` is N of the layer.
LayerArgs resolve_layer(const char* op, int64_t layer, int64_t compression_rate, int64_t list_width,
                        int64_t top_k, const SymInt& t0, int64_t num_nodes, int64_t num_queries);

}  // namespace htree::tree_attention
