// Tree attention over lists that are given, and the lists that an index chooses: docs/semantics/tree_attention.md §1.17.
// Schemas, CPU, CUDA and Meta kernels, Autograd.
#include "ops/tree_attention/listed_attention.h"

#include <ATen/ops/arange.h>

#include "host/autograd.h"
#include "host/op_handle.h"
#include "host/registration.h"
#include "ops/tree_attention/attention.h"
#include "ops/tree_attention/kernels.h"
#include "ops/tree_attention/packed_options.h"
#include "ops/tree_attention/segments.h"

namespace htree::tree_attention {

// ---- the lists of an index

void check_index_options(const char* op, const TreeOptions& options) {
  TORCH_CHECK_VALUE(!options.selection_span.has_value(), op,
                    ": selection_span must be None beside an index, which has scores of its own, got ",
                    options.selection_span.value_or(0));
  TORCH_CHECK_VALUE(options.importance == Importance::kLseCausal, op,
                    ": importance must be lse_causal beside an index, which has scores of its own, got ",
                    kImportanceNames[static_cast<size_t>(options.importance)]);
}

void check_index_heads(const char* op, const char* name, const Tensor& x, const SymInt& heads,
                       const SymInt& kv_heads) {
  TORCH_CHECK_VALUE(same_size(heads, 1) || same_size(heads, kv_heads), op, ": ", name,
                    " must have 1 or H_kv = ", kv_heads, " heads, got ", heads, " in ", x.sym_sizes());
}

BlockOptions blocks_of_nodes(const TreeOptions& options) {
  BlockOptions blocks;
  blocks.count = options.top_k;
  blocks.block_size = options.compression_rate;
  blocks.stride = options.selection_stride;
  blocks.open_next = options.open_next;
  return blocks;
}

namespace {

// The list of every parent up to each leader's own, as layers have it whose nodes all are candidates.
Tensor full_lists(const Tensor& like, int64_t start, int64_t rows, int64_t stride, int64_t parent_span,
                  int64_t width) {
  const Tensor own =
      at::arange(rows, like.options().dtype(at::kLong)).mul_(stride).add_(start).floor_divide_(parent_span);
  const Tensor all = at::arange(width, own.options());
  return all.masked_fill(all.gt(own.unsqueeze(1)), -1).unsqueeze(1);  // [rows, 1, width]
}

// Lists that a kernel can write: contiguous, of the heads of the index.
Tensor lists_to_write(const Tensor& lists, const Tensor& index_query) {
  const int64_t heads = index_query.size(2);
  return lists.is_contiguous() && lists.size(2) == heads
             ? lists
             : at::empty({lists.size(0), lists.size(1), heads, lists.size(3)}, lists.options());
}

}  // namespace

void write_index_lists(SelectBlockLayers* kernel, const char* op, const TreeOptions& options,
                       const Tensor& index_query, const Tensor& index_key, const std::vector<Tensor>& lists) {
  BlockOptions blocks = blocks_of_nodes(options);
  blocks.count = lists.front().size(3);
  const int64_t start = index_key.size(1) - index_query.size(1), rows = lists.front().size(1);
  const auto depth = static_cast<int64_t>(lists.size());
  const bool open = has_open_top(options);
  // With an open top the first rows of a layer are -1, more of them from layer to layer. Else only the top is implied.
  const auto implied_rows = [&](int64_t layer) -> int64_t {
    if (!open) return 0;
    return std::clamp<int64_t>((first_token_of(options, layer + 2) - start) / blocks.stride, 0, rows);
  };
  int64_t chosen = open ? 0 : depth - 1;
  if (open) {
    for (int64_t layer = 0; layer < depth; ++layer) {
      lists[layer].narrow(1, 0, implied_rows(layer)).fill_(-1);
      chosen += implied_rows(layer) < rows;
    }
  } else {
    const int64_t span = node_span(options.compression_rate, depth);
    lists.back().copy_(full_lists(lists.back(), start, rows, blocks.stride, span, blocks.count));
  }
  if (chosen == 0) return;
  // All layers have the rows that the first one has.
  const int64_t first = implied_rows(0), num = rows - first;
  const Tensor query =
      index_query.narrow(1, first * blocks.stride, index_query.size(1) - first * blocks.stride);
  check_blocks(op, query, index_key, blocks);
  const at::ScalarType score = query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  std::vector<BlockLayer> layers;
  for (int64_t layer = 0; layer < chosen; ++layer) {
    const Tensor found = lists_to_write(lists[layer].narrow(1, first, num), query);
    const Tensor scores = query.is_cuda() ? Tensor() : at::empty(found.sizes(), query.options().dtype(score));
    layers.push_back({{found, scores}, open ? start + implied_rows(layer) * blocks.stride : 0});
  }
  kernel(unit_last(query), unit_last(index_key), blocks, options.compression_rate, layers);
  for (int64_t layer = 0; layer < chosen; ++layer) {
    const Tensor& found = std::get<0>(layers[layer].lists);
    const int64_t begin = implied_rows(layer);
    if (found.data_ptr() != lists[layer].narrow(1, first, num).data_ptr()) {
      lists[layer].narrow(1, begin, rows - begin).copy_(found.narrow(1, begin - first, rows - begin));
    }
  }
}

namespace {

constexpr const char* kOp = "tree_attention";

// index_query [B, T_q, H_i, d] of q [B, T_q, H, K], index_key [B, T, H_i, d] of k [B, T, H_kv, K]; H_i is H_kv or 1.
void check_index(const TreeOptions& options, const Tensor& q, const Tensor& k, const Tensor& index_query,
                 const Tensor& index_key, c10::SymIntArrayRef starts) {
  // Queries that are the last tokens are refused in the words of calls without an index.
  const bool suffix =
      starts.size() == 1 && q.dim() == 4 && k.dim() == 4 && same_size(starts[0], suffix_start(q, k));
  if (suffix) {
    check_attention(kOp, q, k, k, options);
  } else {
    check_attention_rows(kOp, q, k, k, starts, options);
  }
  check_index_options(kOp, options);
  check_rank(kOp, "index_query", index_query, 4, "[B, T_q, H_i, d]");
  check_rank(kOp, "index_key", index_key, 4, "[B, T, H_i, d]");
  check_same_device(kOp, "index_query", index_query, "q", q);
  check_size(kOp, "index_query", index_query, 0, q.sym_size(0), "B of q");
  check_size(kOp, "index_query", index_query, 1, q.sym_size(1), "T_q of q");
  check_size(kOp, "index_key", index_key, 1, k.sym_size(1), "T of k");
  check_index_heads(kOp, "index_query", index_query, index_query.sym_size(2), k.sym_size(2));
}

// for each layer l below the top: lists[l] = select_blocks(index_query, index_key, k, block_size=r^(l + 1), ...)[0]
template <SelectBlockLayers* kKernel>
Tensor index_lists(const TreeOptions& options, const Tensor& q, const Tensor& k, const Tensor& index_query,
                   const Tensor& index_key, c10::SymIntArrayRef starts) {
  check_index(options, q, k, index_query, index_key, starts);
  const int64_t pieces = static_cast<int64_t>(starts.size()), stride = options.selection_stride;
  const SymInt piece = q.sym_size(1) / pieces;
  const BlockOptions blocks = blocks_of_nodes(options);
  for (int64_t i = 0; i < pieces; ++i) {
    check_blocks(kOp, index_query.narrow_symint(1, piece * i, piece),
                 index_key.narrow_symint(1, 0, starts[i] + piece), blocks);
  }
  const Tensor lists = new_tensor(all_lists_shape(q, k, options, /*stored=*/true), at::kInt, q);
  if constexpr (kKernel != nullptr) {
    const int64_t queries = piece.expect_int(), depth = depth_of(k.sym_size(1), options);
    const int64_t rows = ceil_div(q.size(1), stride), piece_rows = ceil_div(queries, stride);
    for (int64_t i = 0; i < pieces && depth > 0 && lists.numel() > 0; ++i) {
      std::vector<Tensor> of_piece;
      for (int64_t layer = 0; layer < depth; ++layer) {
        of_piece.push_back(lists.narrow(1, layer * rows + i * piece_rows, piece_rows));
      }
      write_index_lists(kKernel, kOp, options, index_query.narrow(1, i * queries, queries),
                        index_key.narrow(1, 0, starts[i].expect_int() + queries), of_piece);
    }
    lists.slice(1, std::min(depth * rows, lists.size(1))).fill_(-1);
  }
  return lists;
}

// ---- attention over them

// q, k and v as the forward takes them, lists as _attention_rows gives them.
void check_lists(const TreeOptions& options, const Tensor& q, const Tensor& k, const Tensor& v,
                 const Tensor& lists, c10::SymIntArrayRef starts) {
  check_attention_rows(kOp, q, k, v, starts, options);
  check_indices(kOp, "lists", lists, all_lists_shape(q, k, options, /*stored=*/true),
                "[B, max(2, layers * ceil(T_q / selection_stride)), H_kv, width]", "q", q);
}

using Rows = std::tuple<Tensor, Tensor, Tensor>;  // out, gmax, gsum

// _attention_rows with the lists of all layers given.
template <AttentionForward* kKernel>
Rows listed_rows(const TreeOptions& options, const Tensor& q, const Tensor& k, const Tensor& v,
                 const Tensor& lists, c10::SymIntArrayRef starts) {
  check_lists(options, q, k, v, lists, starts);
  Rows results = new_results(q, v);
  if constexpr (kKernel != nullptr) {
    const std::vector<Tensor> layers = lists_of_layers(lists.contiguous(), q, k, options);
    const AttentionArgs args = resolve_options(kOp, options, k, starts, layers);
    const auto& [out, gmax, gsum] = results;
    if (out.numel() > 0) {
      forward_by_depth(kKernel, options, args, unit_last(q), unit_last(k), unit_last(v), out, gmax, gsum,
                       layers);
    }
  }
  return results;
}

using ListedRowsOp = PackedOp<Rows(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& lists,
                                   c10::SymIntArrayRef starts)>;
// (out, gmax + log(gsum)) for queries that are the last tokens.
template <AttentionForward* kKernel>
AttentionLse listed_attention(const TreeOptions& options, const Tensor& q, const Tensor& k, const Tensor& v,
                              const Tensor& lists) {
  check_attention(kOp, q, k, v, options);
  const auto [out, gmax, gsum] = listed_rows<kKernel>(options, q, k, v, lists, {suffix_start(q, k)});
  return {out, log_sum_exp(gmax, gsum)};
}

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

struct ListedNode : Function<ListedNode> {
  static constexpr bool is_traceable = true;

  static variable_list forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& v,
                               const Tensor& lists, const TreeOptions& options) {
    at::AutoDispatchBelowADInplaceOrView guard;
    ctx->set_materialize_grads(false);
    static const ListedRowsOp op("htree::_listed_attention_rows");
    const auto [out, gmax, gsum] = op(options, q, k, v, lists, {suffix_start(q, k)});
    ctx->save_for_backward({q, k, v, out, gmax, gsum, lists});
    save_options(ctx->saved_data, options);
    return {out, log_sum_exp(gmax, gsum)};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const OptionalTensor dout = if_defined(grads[0]), dlse = if_defined(grads[1]);
    if (!dout.has_value() && !dlse.has_value()) {
      return variable_list(5);
    }
    const variable_list saved = ctx->get_saved_variables();
    const Tensor &q = saved[0], &k = saved[1], &v = saved[2];
    const std::array<bool, 3> wanted = {ctx->needs_input_grad(0), ctx->needs_input_grad(1),
                                        ctx->needs_input_grad(2)};
    auto [dq, dk, dv] =
        attention_rows_backward_op()(load_options(ctx->saved_data), q, k, v, saved[3], saved[4], saved[5],
                                     saved[6], dout, dlse, {suffix_start(q, k)}, wanted);
    return {dq, dk, dv, Tensor(), Tensor()};
  }
};

using ListedOp =
    PackedOp<AttentionLse(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& lists)>;

AttentionLse listed_autograd(const TreeOptions& options, const Tensor& q, const Tensor& k, const Tensor& v,
                             const Tensor& lists) {
  if (needs_grad({q, k, v})) {
    check_attention(kOp, q, k, v, options);
    const variable_list results = ListedNode::apply(q, k, v, lists, options);
    return {results[0], results[1]};
  }
  static const ListedOp op("htree::_listed_attention");
  at::AutoDispatchBelowAutograd guard;
  return op(options, q, k, v, lists);
}

template <SelectBlockLayers* kSelect, AttentionForward* kForward>
void register_listed_kernels(const OpKernels& kernels) {
  kernels.impl("_index_lists", TORCH_FN(kPacked<index_lists<kSelect>>));
  kernels.impl("_listed_attention_rows", TORCH_FN(kPacked<listed_rows<kForward>>));
  kernels.impl("_listed_attention", TORCH_FN(kPacked<listed_attention<kForward>>));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(HTREE_NAMESPACE, library) {
  const std::string packed = kPackedSchema;
  const std::string index =
      "_index_lists(Tensor q, Tensor k, Tensor index_query, Tensor index_key, SymInt[] starts, " + packed +
      ") -> Tensor";
  const std::string rows =
      "_listed_attention_rows(Tensor q, Tensor k, Tensor v, Tensor lists, SymInt[] starts, " + packed +
      ") -> (Tensor out, Tensor gmax, Tensor gsum)";
  const std::string listed = "_listed_attention(Tensor q, Tensor k, Tensor v, Tensor lists, " + packed +
                             ") -> (Tensor out, Tensor lse)";
  define_ops(library, {index, rows, listed});
  register_listed_kernels<&select_block_layers_cpu, attention_over_lists_cpu>({library, DispatchKey::CPU});
#if defined(HTREE_WITH_CUDA)
  register_listed_kernels<&select_block_layers_cuda, attention_over_lists_cuda>({library, DispatchKey::CUDA});
#endif
  register_listed_kernels<nullptr, nullptr>({library, DispatchKey::Meta});
  const OpKernels autograd(library, DispatchKey::Autograd);
  register_no_gradient(library, {"_listed_attention_rows"});
  autograd.impl("_index_lists", torch::CppFunction::makeFallthrough());
  autograd.impl("_listed_attention", TORCH_FN(kPacked<listed_autograd>));
  register_autocast(library, {"_listed_attention"});
}

}  // namespace htree::tree_attention
