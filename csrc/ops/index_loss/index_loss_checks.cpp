// Checks and outputs of index_loss. docs/semantics/index_loss.md §9.3
#include "ops/index_loss/index_loss.h"

namespace htree::index_loss {
namespace {

using tree_attention::kIndexLimit;
using tree_attention::state_dtype;

// The widest heads that every kernel holds in registers or shared memory.
constexpr int64_t kMostKeyDim = 1024;

void check_options(const char* op, const Options& options) {
  TORCH_CHECK_VALUE(options.block_size >= 1 && options.block_size < kIndexLimit, op,
                    ": block_size must be between 1 and ", kIndexLimit - 1, ", got ", options.block_size);
  tree_attention::check_scale(op, options.scale);
}

// `rank` is 4, or 3 for packed documents.
void check_ranks_and_types(const char* op, const Inputs& x, int64_t rank) {
  const bool packed = rank == 3;
  check_rank(op, "query", x.query, rank, packed ? "[N, H, K] with cu_seqlens" : "[B, T, H, K]");
  check_rank(op, "key", x.key, rank, packed ? "[N, H_kv, K] with cu_seqlens" : "[B, T, H_kv, K]");
  check_rank(op, "index_query", x.index_query, rank,
             packed ? "[N, H_i, d] with cu_seqlens" : "[B, T, H_i, d]");
  check_rank(op, "index_key", x.index_key, rank, packed ? "[N, H_i, d] with cu_seqlens" : "[B, T, H_i, d]");
  check_floating(op, "query", x.query, /*double_on_cuda=*/false);
  for (const auto& [name, tensor] : {std::pair("key", x.key), std::pair("index_query", x.index_query),
                                     std::pair("index_key", x.index_key)}) {
    check_same_dtype(op, name, tensor, "query", x.query);
    check_same_device(op, name, tensor, "query", x.query);
  }
}

void check_sizes(const char* op, const Inputs& x, int64_t rank) {
  const int64_t last = rank - 1, head = rank - 2, row = rank - 3;
  const char* rows = rank == 3 ? "N of query" : "T of query";
  for (const auto& [name, tensor] : {std::pair("key", x.key), std::pair("index_query", x.index_query),
                                     std::pair("index_key", x.index_key)}) {
    if (rank == 4) check_size(op, name, tensor, 0, x.query.sym_size(0), "B of query");
    check_size(op, name, tensor, row, x.query.sym_size(row), rows);
  }
  const SymInt width = x.query.sym_size(last), heads = x.query.sym_size(head),
               kv_heads = x.key.sym_size(head);
  TORCH_CHECK_VALUE(holds(width.sym_ge(1)) && holds(width.sym_le(kMostKeyDim)), op,
                    ": K, the last size of query, must be between 1 and ", kMostKeyDim, ", got ", width,
                    " in ", x.query.sym_sizes());
  check_size(op, "key", x.key, last, width, "K of query");
  TORCH_CHECK_VALUE(holds(kv_heads.sym_ge(1)) && holds(heads.sym_ge(1)) && same_size(heads % kv_heads, 0), op,
                    ": H of query must be a positive multiple of H_kv of key, got H = ", heads,
                    " and H_kv = ", kv_heads, " in ", x.query.sym_sizes(), " and ", x.key.sym_sizes());
  const SymInt index_heads = x.index_query.sym_size(head), d = x.index_query.sym_size(last);
  TORCH_CHECK_VALUE(index_heads.sym_eq(1).guard_bool(__FILE__, __LINE__) || same_size(index_heads, kv_heads),
                    op, ": size ", head, " of index_query must be 1 or ", kv_heads, " (H_kv of key), got ",
                    index_heads, " in ", x.index_query.sym_sizes());
  check_size(op, "index_key", x.index_key, head, index_heads, "H_i of index_query");
  tree_attention::check_index_width(op, "index_query", x.index_query);
  check_size(op, "index_key", x.index_key, last, d, "d of index_query");
  TORCH_CHECK_VALUE(holds(x.query.sym_size(row).sym_lt(kIndexLimit)), op,
                    ": query must have less than 2^31 rows, got ", x.query.sym_sizes());
}

void check_positions(const char* op, const Inputs& x, int64_t rank) {
  const Tensor& positions = x.positions;
  check_dtype(op, "positions", positions, {at::kLong});
  check_same_device(op, "positions", positions, "query", x.query);
  if (rank == 3) {
    check_rank(op, "positions", positions, 1, "[rows] with cu_seqlens");
  } else {
    TORCH_CHECK_VALUE(positions.dim() == 1 || positions.dim() == 2, op,
                      ": positions must be 1-D [rows] or 2-D [B, rows], got ", positions.dim(), "-D ",
                      positions.sym_sizes());
    if (positions.dim() == 2) check_size(op, "positions", positions, 0, x.query.sym_size(0), "B of query");
  }
  TORCH_CHECK_VALUE(holds(positions.sym_size(-1).sym_lt(kIndexLimit)), op,
                    ": positions must have less than 2^31 rows, got ", positions.sym_sizes());
}

Results new_results(const Inputs& x) {
  const int64_t rank = x.query.dim();
  const SymInt batch = rank == 3 ? SymInt(1) : x.query.sym_size(0), rows = x.positions.sym_size(-1);
  const at::ScalarType dtype = state_dtype(x.query);
  return {new_tensor({}, dtype, x.query),
          new_tensor({batch, rows, x.query.sym_size(rank - 2)}, dtype, x.query),
          new_tensor({batch, rows, x.index_query.sym_size(rank - 2)}, dtype, x.query)};
}

}  // namespace

Results prepare_forward(const char* op, const Inputs& x, const Options& options) {
  const int64_t rank = x.cu_seqlens.defined() ? 3 : 4;
  check_options(op, options);
  check_ranks_and_types(op, x, rank);
  check_sizes(op, x, rank);
  check_positions(op, x, rank);
  if (x.cu_seqlens.defined()) {
    check_rank(op, "cu_seqlens", x.cu_seqlens, 1, "[documents + 1]");
    check_dtype(op, "cu_seqlens", x.cu_seqlens, {at::kInt});
    check_same_device(op, "cu_seqlens", x.cu_seqlens, "query", x.query);
    TORCH_CHECK_VALUE(holds(x.cu_seqlens.sym_size(0).sym_ge(1)), op,
                      ": cu_seqlens must have at least one element, got ", x.cu_seqlens.sym_sizes());
  }
  return new_results(x);
}

Gradients prepare_backward(const char* op, const Inputs& x, const Results& results, const Tensor& dloss,
                           const GradientMask& mask) {
  const auto& [loss, lse, index_lse] = new_results(x);
  const auto check_one = [&](const char* name, const Tensor& tensor, const Tensor& like, const char* shape) {
    check_dtype(op, name, tensor, {like.scalar_type()});
    check_same_device(op, name, tensor, "query", x.query);
    check_shape(op, name, tensor, like.sym_sizes(), shape);
  };
  check_one("lse", std::get<1>(results), lse, "B, rows and H");
  check_one("index_lse", std::get<2>(results), index_lse, "B, rows and H_i");
  check_one("dloss", dloss, loss, "a scalar");
  return {new_gradient(mask[0], x.index_query), new_gradient(mask[1], x.index_key)};
}

}  // namespace htree::index_loss
