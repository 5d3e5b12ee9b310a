// Checks and outputs of sparse_attention. docs/semantics/sparse_attention.md §8
#include "ops/sparse_attention/sparse_attention.h"

namespace htree::tree_attention {
namespace {

void check_options(const char* op, const SparseInputs& x, const SparseOptions& options) {
  const int64_t size = options.block_size, stride = options.selection_stride;
  TORCH_CHECK_VALUE(size >= 1 && size < kIndexLimit, op, ": block_size must be between 1 and ",
                    kIndexLimit - 1, ", got ", size);
  TORCH_CHECK_NOT_IMPLEMENTED(!x.query.is_cuda() || size >= 16, op, ": block_size = ", size,
                              " has no kernel on CUDA; block_size must be at least 16 there");
  const bool power_of_two = stride >= 1 && (stride & (stride - 1)) == 0;
  TORCH_CHECK_VALUE(power_of_two && size % stride == 0, op,
                    ": selection_stride must be a power of two that divides block_size = ", size, ", got ",
                    stride);
  check_scale(op, options.scale);
}

// `rank` is 4, or 3 for packed documents. All but the rows of blocks, which depend on it.
void check_tensors(const char* op, const SparseInputs& x, int64_t rank) {
  const auto& [query, key, value, blocks, sinks] = x;
  const bool packed = rank == 3;
  check_rank(op, "query", query, rank, packed ? "[N_q, H, K]" : "[B, T_q, H, K]");
  check_rank(op, "key", key, rank, packed ? "[N_k, H_kv, K]" : "[B, T, H_kv, K]");
  check_rank(op, "value", value, rank, packed ? "[N_k, H_kv, V]" : "[B, T, H_kv, V]");
  check_rank(op, "blocks", blocks, rank,
             packed ? "[N_q, H_kv or 1, n]" : "[B, ceil(T_q / selection_stride), H_kv or 1, n]");
  check_floating(op, "query", query, /*double_on_cuda=*/false);
  check_dtype(op, "blocks", blocks, {at::kInt});
  for (const auto& [name, tensor] : {std::pair("key", key), std::pair("value", value)}) {
    check_same_dtype(op, name, tensor, "query", query);
    check_same_device(op, name, tensor, "query", query);
  }
  check_same_device(op, "blocks", blocks, "query", query);
  const int64_t last = rank - 1, head = rank - 2, row = rank - 3;
  if (!packed) {
    for (const auto& [name, tensor] :
         {std::pair("key", key), std::pair("value", value), std::pair("blocks", blocks)}) {
      check_size(op, name, tensor, 0, query.sym_size(0), "B of query");
    }
  }
  check_size(op, "key", key, last, query.sym_size(last), "K of query");
  TORCH_CHECK_VALUE(holds(query.sym_size(last).sym_ge(1)), op,
                    ": K, the last size of query, must be at least 1, got ", query.sym_sizes());
  TORCH_CHECK_VALUE(holds(value.sym_size(last).sym_ge(1)), op,
                    ": V, the last size of value, must be at least 1, got ", value.sym_sizes());
  const SymInt heads = query.sym_size(head), kv_heads = key.sym_size(head);
  TORCH_CHECK_VALUE(holds(kv_heads.sym_ge(1)) && holds(heads.sym_ge(1)) && same_size(heads % kv_heads, 0), op,
                    ": H of query must be a positive multiple of H_kv of key, got H = ", heads,
                    " and H_kv = ", kv_heads, " in ", query.sym_sizes(), " and ", key.sym_sizes());
  check_size(op, "value", value, row, key.sym_size(row), packed ? "N_k of key" : "T of key");
  check_size(op, "value", value, head, kv_heads, "H_kv of key");
  const SymInt list_heads = blocks.sym_size(head);
  TORCH_CHECK_VALUE(list_heads.sym_eq(1).guard_bool(__FILE__, __LINE__) || same_size(list_heads, kv_heads),
                    op, ": size ", head, " of blocks must be 1 or ", kv_heads, " (H_kv of key), got ",
                    list_heads, " in ", blocks.sym_sizes());
  for (const auto& [name, tensor] : {std::pair("query", query), std::pair("key", key)}) {
    TORCH_CHECK_VALUE(holds(tensor.sym_size(row).sym_lt(kIndexLimit)), op, ": ", name,
                      " must have less than 2^31 rows, got ", tensor.sym_sizes());
  }
  if (sinks.defined()) {
    check_rank(op, "sinks", sinks, 1, "[H]");
    check_dtype(op, "sinks", sinks, {at::kFloat, at::kHalf, at::kBFloat16, at::kDouble});
    check_same_device(op, "sinks", sinks, "query", query);
    check_size(op, "sinks", sinks, 0, heads, "H of query");
  }
}

SparseResults new_results(const SparseInputs& x) {
  c10::SymDimVector shape(x.query.sym_sizes().begin(), x.query.sym_sizes().end() - 1);
  const Tensor lse = new_tensor(shape, state_dtype(x.query), x.query);
  shape.push_back(x.value.sym_size(-1));
  return {new_tensor(shape, x.query.scalar_type(), x.query), lse};
}

}  // namespace

SparseResults prepare_sparse_attention(const char* op, const SparseInputs& x, const SparseOptions& options) {
  check_options(op, x, options);
  check_tensors(op, x, /*rank=*/4);
  const int64_t stride = options.selection_stride;
  const SymInt queries = x.query.sym_size(1), before = x.key.sym_size(1) - queries;
  TORCH_CHECK_VALUE(
      holds(before.sym_ge(0)), op,
      ": query must have at most as many rows as key (it is a suffix of the keys), got T_q = ", queries,
      " and T = ", x.key.sym_size(1), " in ", x.query.sym_sizes(), " and ", x.key.sym_sizes());
  TORCH_CHECK_VALUE(stride == 1 || same_size(before % stride, 0), op,
                    ": T - T_q must be a multiple of selection_stride = ", stride,
                    ", got T = ", x.key.sym_size(1), " and T_q = ", queries);
  check_size(op, "blocks", x.blocks, 1, list_rows(queries, stride), "ceil(T_q / selection_stride)");
  return new_results(x);
}

SparseResults prepare_sparse_varlen(const char* op, const SparseInputs& x, const Documents& documents,
                                    const SparseOptions& options) {
  check_options(op, x, options);
  check_tensors(op, x, /*rank=*/3);
  check_size(op, "blocks", x.blocks, 0, x.query.sym_size(0), "N_q of query");
  check_documents(op, documents, "query", x.query);
  return new_results(x);
}

SparseGradients prepare_sparse_backward(const char* op, const SparseInputs& x, const SparseResults& results,
                                        const OptionalTensor& dout, const OptionalTensor& dlse,
                                        const SparseMask& mask) {
  const auto& [out, lse] = new_results(x);
  const auto check_one = [&](const char* name, const Tensor& tensor, const Tensor& like, const char* shape) {
    check_dtype(op, name, tensor, {like.scalar_type()});
    check_same_device(op, name, tensor, "query", x.query);
    check_shape(op, name, tensor, like.sym_sizes(), shape);
  };
  check_one("out", std::get<0>(results), out, "query with V of value");
  check_one("lse", std::get<1>(results), lse, "query without K");
  if (dout.has_value()) check_one("dout", *dout, out, "query with V of value");
  if (dlse.has_value()) check_one("dlse", *dlse, lse, "query without K");
  return {new_gradient(mask[0], x.query), new_gradient(mask[1], x.key), new_gradient(mask[2], x.value),
          new_gradient(mask[3] && x.sinks.defined(), x.sinks)};
}

}  // namespace htree::tree_attention
