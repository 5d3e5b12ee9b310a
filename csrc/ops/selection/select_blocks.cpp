// Schemas, checks, Meta and registrations of select_blocks and select_blocks_varlen. docs/semantics/selection.md §9
#include "ops/selection/select_blocks.h"

#include <torch/library.h>

#include "host/no_gradient.h"
#include "host/registration.h"

namespace htree::tree_attention {
namespace {

constexpr const char* kOp = "select_blocks";
constexpr const char* kVarlenOp = "select_blocks_varlen";

void check_block_options(const char* op, const BlockOptions& options) {
  const auto& [count, block_size, stride, local, first, open_next] = options;
  for (const auto& [name, value] : {std::pair("count", count), std::pair("block_size", block_size),
                                    std::pair("selection_stride", stride), std::pair("local", local)}) {
    TORCH_CHECK_VALUE(value >= 1 && value < kIndexLimit, op, ": ", name, " must be between 1 and ",
                      kIndexLimit - 1, ", got ", value);
  }
  TORCH_CHECK_VALUE(first >= 0, op, ": first must be at least 0, got ", first);
  TORCH_CHECK_VALUE((stride & (stride - 1)) == 0 && block_size % stride == 0, op,
                    ": selection_stride must be a power of two that divides block_size = ", block_size,
                    ", got ", stride);
  TORCH_CHECK_VALUE(local <= count && first <= count - local, op,
                    ": local and first must leave local + first <= count = ", count, ", got local = ", local,
                    " and first = ", first);
}

// index_query and index_key of `rank` dimensions, whose rows are dimension rank - 3.
void check_index(const char* op, const Tensor& index_query, const Tensor& index_key, int64_t rank) {
  const bool packed = rank == 3;
  check_rank(op, "index_query", index_query, rank, packed ? "[N_q, H_i, d]" : "[B, T_q, H_i, d]");
  check_rank(op, "index_key", index_key, rank, packed ? "[N_k, H_i, d]" : "[B, T, H_i, d]");
  check_floating(op, "index_query", index_query, /*double_on_cuda=*/false);
  check_same_dtype(op, "index_key", index_key, "index_query", index_query);
  check_same_device(op, "index_key", index_key, "index_query", index_query);
  if (!packed) {
    check_size(op, "index_key", index_key, 0, index_query.sym_size(0), "B of index_query");
  }
  check_size(op, "index_key", index_key, rank - 2, index_query.sym_size(rank - 2), "H_i of index_query");
  check_size(op, "index_key", index_key, rank - 1, index_query.sym_size(rank - 1), "d of index_query");
  check_index_width(op, "index_query", index_query);
  for (const auto& [name, x] : {std::pair("index_query", index_query), std::pair("index_key", index_key)}) {
    TORCH_CHECK_VALUE(holds(x.sym_size(rank - 3).sym_lt(kIndexLimit)), op, ": ", name,
                      " must have less than 2^31 rows, got ", x.sym_size(rank - 3));
  }
}

BlockLists new_lists(const Tensor& index_query, c10::SymIntArrayRef shape) {
  return {new_tensor(shape, at::kInt, index_query), new_tensor(shape, state_dtype(index_query), index_query)};
}

// score = (iq[:, ::s].float() @ ik.float().mT).unflatten(-1, (-1, block_size)).amax(-1)  # one head, NaN as -inf
// score[diagonal - local + 1 : diagonal + 1] = score[:first] = inf
// blocks = score[: diagonal + 1].sort(descending=True, stable=True).indices[:count].sort()  # then -1
template <SelectBlocks* kKernel>
BlockLists select_blocks(const Tensor& index_query, const Tensor& index_key, int64_t count,
                         int64_t block_size, int64_t selection_stride, int64_t local, int64_t first,
                         bool open_next) {
  const BlockOptions options = {count, block_size, selection_stride, local, first, open_next};
  BlockLists lists = prepare_blocks(kOp, index_query, index_key, options);
  if constexpr (kKernel != nullptr) {
    if (std::get<0>(lists).numel() > 0) {
      kKernel(unit_last(index_query), unit_last(index_key), options, lists);
    }
  }
  return lists;
}

// for every document: blocks[its queries][::s] = select_blocks(index_query[its queries], index_key[its keys], ...)
template <SelectBlocksVarlen* kKernel>
BlockLists select_blocks_varlen(const Tensor& index_query, const Tensor& index_key, const Tensor& cu_seq_q,
                                const Tensor& cu_seq_k, SymInt max_q, SymInt max_k, int64_t count,
                                int64_t block_size, int64_t selection_stride, int64_t local, int64_t first,
                                bool open_next) {
  const BlockOptions options = {count, block_size, selection_stride, local, first, open_next};
  const Documents documents = {cu_seq_q, cu_seq_k, max_q, max_k};
  BlockLists lists = prepare_blocks_varlen(kVarlenOp, index_query, index_key, documents, options);
  if constexpr (kKernel != nullptr) {
    kKernel(kVarlenOp, unit_last(index_query), unit_last(index_key), documents, options, lists);
  }
  return lists;
}

template <SelectBlocks* kKernel, SelectBlocksVarlen* kVarlenKernel>
void register_kernels(const OpKernels& kernels) {
  kernels.impl("select_blocks", TORCH_FN((select_blocks<kKernel>)));
  kernels.impl("select_blocks_varlen", TORCH_FN((select_blocks_varlen<kVarlenKernel>)));
}

}  // namespace

void check_blocks(const char* op, const Tensor& index_query, const Tensor& index_key,
                  const BlockOptions& options) {
  check_block_options(op, options);
  check_index(op, index_query, index_key, 4);
  const SymInt queries = index_query.sym_size(1), tokens = index_key.sym_size(1);
  TORCH_CHECK_VALUE(holds(queries.sym_le(tokens)), op,
                    ": T_q of index_query must be at most T of index_key (", tokens, "), got ", queries,
                    " in ", index_query.sym_sizes());
  TORCH_CHECK_VALUE(same_size((tokens - queries) % options.stride, 0), op,
                    ": T - T_q must be a multiple of selection_stride = ", options.stride,
                    ", got T = ", tokens, " and T_q = ", queries);
}

BlockLists prepare_blocks(const char* op, const Tensor& index_query, const Tensor& index_key,
                          const BlockOptions& options) {
  check_blocks(op, index_query, index_key, options);
  return new_lists(index_query, {index_query.sym_size(0), list_rows(index_query.sym_size(1), options.stride),
                                 index_query.sym_size(2), options.count});
}

void check_blocks_varlen(const char* op, const Tensor& index_query, const Tensor& index_key,
                         const Documents& documents, const BlockOptions& options) {
  check_block_options(op, options);
  check_index(op, index_query, index_key, 3);
  check_documents(op, documents, "index_query", index_query);
}

BlockLists prepare_blocks_varlen(const char* op, const Tensor& index_query, const Tensor& index_key,
                                 const Documents& documents, const BlockOptions& options) {
  check_blocks_varlen(op, index_query, index_key, documents, options);
  return new_lists(index_query, {index_query.sym_size(0), index_query.sym_size(1), options.count});
}

TORCH_LIBRARY_FRAGMENT(HTREE_NAMESPACE, library) {
  const std::string options =
      "int count, int block_size=16, int selection_stride=1, int local=1, int first=0, bool open_next=False) "
      "-> (Tensor blocks, Tensor scores)";
  const std::string select = "select_blocks(Tensor index_query, Tensor index_key, " + options;
  const std::string varlen =
      "select_blocks_varlen(Tensor index_query, Tensor index_key, Tensor cu_seq_q, Tensor cu_seq_k, "
      "SymInt max_q, SymInt max_k, " +
      options;
  define_ops(library, {select, varlen});
  register_kernels<&select_blocks_cpu, &select_blocks_varlen_cpu>({library, DispatchKey::CPU});
#if defined(HTREE_WITH_CUDA)
  register_kernels<&select_blocks_cuda, &select_blocks_varlen_cuda>({library, DispatchKey::CUDA});
#endif
  register_kernels<nullptr, nullptr>({library, DispatchKey::Meta});
  register_no_gradient(library, {"select_blocks", "select_blocks_varlen"});
}

}  // namespace htree::tree_attention
