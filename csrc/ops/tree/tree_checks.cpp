#include "ops/tree/tree_checks.h"

namespace htree::tree_attention {

Importance parse_importance(const char* op, std::string_view name) {
  if (name == "lse_causal") {
    return Importance::kLseCausal;
  }
  if (name == "lse") {
    return Importance::kLse;
  }
  TORCH_CHECK_VALUE(name == "exp_joint", op, ": importance must be one of lse_causal, lse, exp_joint, got '",
                    name, "'");
  return Importance::kExpJoint;
}

void check_scale(const char* op, std::optional<double> scale) {
  if (scale.has_value()) {
    check_finite(op, "scale", *scale);
  }
}

void check_rate(const char* op, int64_t compression_rate) {
  TORCH_CHECK_VALUE(compression_rate >= 2 && compression_rate < kIndexLimit, op,
                    ": compression_rate must be between 2 and ", kIndexLimit - 1, ", got ", compression_rate);
}

void check_list_width(const char* op, const char* name, int64_t width, int64_t compression_rate) {
  const int64_t most = (kIndexLimit - 1) / compression_rate;  // positions are int32
  TORCH_CHECK_VALUE(width >= 1 && width <= most, op, ": ", name, " must be between 1 and ", most,
                    " (positions are int32), got ", width);
}

void check_selection_stride(const char* op, int64_t selection_stride, int64_t compression_rate) {
  const bool power_of_two = selection_stride >= 1 && (selection_stride & (selection_stride - 1)) == 0;
  TORCH_CHECK_VALUE(power_of_two && compression_rate % selection_stride == 0, op,
                    ": selection_stride must be a power of two that divides compression_rate = ",
                    compression_rate, ", got ", selection_stride);
}

void check_selection_span(const char* op, std::optional<int64_t> selection_span, int64_t compression_rate,
                          Importance importance) {
  if (!selection_span.has_value()) {
    return;
  }
  const int64_t span = *selection_span;
  TORCH_CHECK_VALUE(span >= 1 && compression_rate % span == 0, op,
                    ": selection_span must be None or a divisor of compression_rate = ", compression_rate,
                    " (at least 1), got ", span);
  TORCH_CHECK_VALUE(importance != Importance::kLse, op,
                    ": selection_span must be None where importance is 'lse', got ", span);
}

void check_position(const char* op, int64_t layer, int64_t compression_rate, const SymInt& t0,
                    int64_t selection_stride) {
  check_at_least(op, "layer", layer, 0);
  check_rate(op, compression_rate);
  check_selection_stride(op, selection_stride, compression_rate);
  TORCH_CHECK_VALUE(holds(t0.sym_ge(0)), op, ": t0 must be at least 0, got ", t0);
  TORCH_CHECK_VALUE(selection_stride == 1 || same_size(t0 % selection_stride, 0), op,
                    ": t0 must be a multiple of selection_stride (", selection_stride, "), got ", t0);
}

void check_queries(const char* op, const Tensor& q, const char* keys_name, const Tensor& keys) {
  check_rank(op, "q", q, 4, "[B, T_q, H, K]");
  check_rank(op, keys_name, keys, 4, "[B, N, H_kv, K]");
  check_floating(op, "q", q, /*double_on_cuda=*/false);
  check_same_dtype(op, keys_name, keys, "q", q);
  check_same_device(op, keys_name, keys, "q", q);
  check_size(op, keys_name, keys, 0, q.sym_size(0), "B of q");
  check_size(op, keys_name, keys, 3, q.sym_size(3), "K of q");
  const SymInt key_dim = q.sym_size(3);
  TORCH_CHECK_VALUE(holds(key_dim.sym_ge(2)) && same_size(key_dim % 2, 0), op,
                    ": K, the last size of q, must be even and at least 2, got ", key_dim, " in ",
                    q.sym_sizes());
  const SymInt heads = q.sym_size(2);
  const SymInt kv_heads = keys.sym_size(2);
  TORCH_CHECK_VALUE(holds(kv_heads.sym_ge(1)) && holds(heads.sym_ge(1)) && same_size(heads % kv_heads, 0), op,
                    ": H of q must be a positive multiple of H_kv of ", keys_name, ", got H = ", heads,
                    " and H_kv = ", kv_heads, " in ", q.sym_sizes(), " and ", keys.sym_sizes());
}

void check_values(const char* op, const char* keys_name, const Tensor& keys, const char* values_name,
                  const Tensor& values) {
  check_rank(op, values_name, values, 4, "[B, N, H_kv, V]");
  check_same_dtype(op, values_name, values, keys_name, keys);
  check_same_device(op, values_name, values, keys_name, keys);
  const auto check_like_keys = [&](int64_t dim, const char* meaning) {
    TORCH_CHECK_VALUE(same_size(values.sym_size(dim), keys.sym_size(dim)), op, ": size ", dim, " of ",
                      values_name, " must be ", keys.sym_size(dim), " (", meaning, " of ", keys_name,
                      "), got ", values.sym_size(dim), " in ", values.sym_sizes());
  };
  check_like_keys(0, "B");
  check_like_keys(1, "length");
  check_like_keys(2, "H_kv");
  TORCH_CHECK_VALUE(holds(values.sym_size(3).sym_ge(1)), op, ": V, the last size of ", values_name,
                    ", must be at least 1, got ", values.sym_sizes());
}

void check_indices(const char* op, const char* name, const Tensor& indices, c10::SymIntArrayRef shape,
                   const char* meaning, const char* like_name, const Tensor& like) {
  check_dtype(op, name, indices, {at::kInt});
  check_shape(op, name, indices, shape, meaning);
  check_same_device(op, name, indices, like_name, like);
}

void check_parents(const char* op, const Tensor& parents, const char* q_name, const Tensor& q,
                   const SymInt& heads, int64_t compression_rate, int64_t selection_stride) {
  check_rank(op, "parents", parents, 4, "[B, ceil(T_q / s), H_kv, k]");
  const SymInt width = parents.sym_size(3);
  TORCH_CHECK_VALUE(
      holds(width.sym_ge(1)) && holds((width * compression_rate).sym_lt(kIndexLimit)), op,
      ": k, the last size of parents, must be at least 1 and below 2^31 / compression_rate, got ",
      parents.sym_sizes());
  check_indices(op, "parents", parents,
                {q.sym_size(0), list_rows(q.sym_size(1), selection_stride), heads, width},
                "[B, ceil(T_q / selection_stride), selection heads, k]", q_name, q);
}

void check_cache(const char* op, const Tensor& cos, const Tensor& sin, const char* x_name, const Tensor& x,
                 const SymInt& min_size) {
  check_rank(op, "cos", cos, 2, "[size, K/2]");
  check_dtype(op, "cos", cos, {state_dtype(x)});
  check_same_device(op, "cos", cos, x_name, x);
  check_size(op, "cos", cos, 1, x.sym_size(3) / 2, "K / 2");
  TORCH_CHECK_VALUE(holds(cos.sym_size(0).sym_ge(min_size)), op, ": cos must hold at least ", min_size,
                    " positions, got ", cos.sym_sizes());
  check_same_dtype(op, "sin", sin, "cos", cos);
  check_same_device(op, "sin", sin, "cos", cos);
  check_shape(op, "sin", sin, cos.sym_sizes(), "the shape of cos");
}

void check_index_width(const char* op, const char* name, const Tensor& x) {
  const SymInt width = x.sym_size(-1);
  TORCH_CHECK_VALUE(holds(width.sym_ge(16)) && holds(width.sym_le(128)) && same_size(width % 16, 0), op,
                    ": d, the last size of ", name, ", must be a multiple of 16 up to 128, got ", width,
                    " in ", x.sym_sizes());
}

void check_state_dtype(const char* op, const char* name, const Tensor& tensor) {
  if (tensor.is_cuda()) {
    TORCH_CHECK_TYPE(tensor.scalar_type() == at::kFloat, op, ": ", name,
                     " must have dtype torch.float32 on CUDA, got ", dtype_name(tensor.scalar_type()));
  }
  check_dtype(op, name, tensor, {at::kFloat, at::kDouble});
}

void check_state(const char* op, const char* const (&names)[3], const Tensor& max, const Tensor& sum,
                 const Tensor& out) {
  check_rank(op, names[2], out, 4, "[B, T_q, H, V]");
  check_state_dtype(op, names[2], out);
  TORCH_CHECK_VALUE(holds(out.sym_size(3).sym_ge(1)), op, ": V, the last size of ", names[2],
                    ", must be at least 1, got ", out.sym_sizes());
  const auto rows = out.sym_sizes().slice(0, 3);
  for (int i = 0; i < 2; ++i) {
    const Tensor& part = i == 0 ? max : sum;
    check_same_dtype(op, names[i], part, names[2], out);
    check_same_device(op, names[i], part, names[2], out);
    check_shape(op, names[i], part, rows, "[B, T_q, H]");
  }
}

std::tuple<Tensor, Tensor, Tensor> new_state(const SymInt& batch, const SymInt& queries, const SymInt& heads,
                                             const SymInt& value_dim, const Tensor& like) {
  const auto dtype = state_dtype(like);
  return {new_tensor({batch, queries, heads}, dtype, like), new_tensor({batch, queries, heads}, dtype, like),
          new_tensor({batch, queries, heads, value_dim}, dtype, like)};
}

LayerArgs resolve_layer(const char* op, int64_t layer, int64_t compression_rate, int64_t list_width,
                        int64_t top_k, const SymInt& t0, int64_t num_nodes, int64_t num_queries) {
  const int64_t first = t0.guard_int(__FILE__, __LINE__);
  TORCH_CHECK_VALUE(num_nodes < kIndexLimit, op, ": N, the nodes of the layer, must be below 2^31, got ",
                    num_nodes);
  TORCH_CHECK_VALUE(first < kIndexLimit && num_queries < kIndexLimit - first, op,
                    ": t0 + T_q must be below 2^31, got t0 = ", first, " and T_q = ", num_queries);
  LayerArgs args;
  args.layer = layer;
  args.compression_rate = compression_rate;
  args.list_width = list_width;
  args.top_k = top_k;
  args.t0 = first;
  return args;
}

}  // namespace htree::tree_attention
