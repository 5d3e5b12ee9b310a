// Schemas, checks, CPU and Meta kernels of the ops for prompts.
// docs/semantics/tree_cache.md §7.6; docs/semantics/conventions.md §0.5.
#include "ops/tree_cache/prompt/prompt_ops.h"

#include <algorithm>
#include <array>
#include <string>

#include "host/check.h"
#include "host/no_gradient.h"
#include "host/overlap.h"
#include "host/registration.h"
#include "ops/tree_attention/segments.h"

namespace htree::tree_cache {
namespace {

constexpr const char* kBytesOp = "tree_cache_prompt_bytes";
constexpr const char* kPackOp = "tree_cache_pack_prompt_";
constexpr const char* kPromptOp = "tree_cache_prompt";

using OptionalTensor = std::optional<Tensor>;
using tree_attention::kPacked;

void check_heads(const char* op, const char* name, const SymInt& num_heads, const SymInt& kv_heads) {
  TORCH_CHECK_VALUE(holds(num_heads.sym_ge(1)) && same_size(num_heads % kv_heads, 0), op, ": ", name,
                    " must be a positive multiple of H_kv = ", kv_heads, ", got ", num_heads);
}

void check_capacity(const char* op, const char* name, int64_t capacity, int64_t least) {
  TORCH_CHECK_VALUE(capacity >= least && capacity < tree_attention::kIndexLimit, op, ": ", name,
                    " must be at least ", least, " and below 2^31, got ", capacity);
}

void check_sequences(const char* op, const Pools& pages, const TreeOptions& options, const char* name,
                     int64_t tokens) {
  check_cache_options(op, options);
  check_pools(op, pages, options);
  tree_attention::check_frequencies(op, options, pages.keys.sym_size(3));
  const SymInt most = pages.block_table.sym_size(1) * pages.page_size;
  TORCH_CHECK_VALUE(tokens >= 0 && holds(most.sym_ge(tokens)), op, ": ", name,
                    " must lie between 0 and max_pages * page_size = ", most, ", got ", tokens);
}

void check_copies(const char* op, const Tensor& copies, const Tensor& keys) {
  check_rank(op, "copies", copies, 1, "[bytes]");
  check_dtype(op, "copies", copies, {at::kByte});
  check_same_device(op, "copies", copies, "k_pool", keys);
  check_contiguous(op, "copies", copies);
}

// The last num_queries tokens of a sequence, with every option resolved.
AttentionProblem problem_of(const Tensor& keys, int64_t value_dim, int64_t num_sequences, int64_t num_heads,
                            int64_t tokens, int64_t num_queries, const TreeOptions& options) {
  AttentionProblem problem;
  problem.batch = num_sequences;
  problem.num_keys = tokens;
  problem.num_queries = num_queries;
  problem.num_heads = num_heads;
  problem.num_kv_heads = keys.size(1);
  problem.key_dim = keys.size(3);
  problem.value_dim = value_dim;
  problem.half_dtype = keys.scalar_type() == at::kHalf || keys.scalar_type() == at::kBFloat16;
  problem.args = tree_attention::resolve(options, problem.key_dim);
  problem.args.starts = {tokens - num_queries};
  return problem;
}

template <PromptBytes* kKernel>
void check_copy_bytes(const char* op, const Tensor& copies, const AttentionProblem& problem,
                      const Tensor& keys, int64_t capacity) {
  AttentionProblem longest = problem;
  longest.num_keys = capacity;
  longest.args.starts = {capacity - problem.num_queries};
  const int64_t bytes = kKernel(keys, longest);
  TORCH_CHECK_VALUE(copies.numel() == bytes, op, ": copies must have the ", bytes,
                    " bytes that tree_cache_prompt_bytes gives for capacity = ", capacity, ", got ",
                    copies.numel());
}

// ---- the ops

// bytes of the copies of num_sequences sequences of up to `capacity` tokens; 0 where tree_cache_prompt reads none
template <PromptBytes* kKernel>
int64_t prompt_bytes(const TreeOptions& options, const Tensor& k_pool, const Tensor& v_pool,
                     int64_t num_sequences, int64_t num_heads, int64_t capacity) {
  check_cache_options(kBytesOp, options);
  check_rank(kBytesOp, "k_pool", k_pool, 4, "[num_pages, H_kv, key rows, K]");
  check_floating(kBytesOp, "k_pool", k_pool, /*double_on_cuda=*/false);
  check_rank(kBytesOp, "v_pool", v_pool, 4, "[num_pages, H_kv, value rows, V]");
  check_at_least(kBytesOp, "num_sequences", num_sequences, 0);
  TORCH_CHECK_VALUE(holds(k_pool.sym_size(1).sym_ge(1)), kBytesOp,
                    ": H_kv of k_pool must be at least 1, got ", k_pool.sym_sizes());
  check_heads(kBytesOp, "num_heads", num_heads, k_pool.sym_size(1));
  check_capacity(kBytesOp, "capacity", capacity, 1);
  if constexpr (kKernel != nullptr) {
    return kKernel(k_pool, problem_of(k_pool, v_pool.size(3), num_sequences, num_heads, capacity,
                                      /*num_queries=*/1, options));
  }
  return 0;
}

// copies: those of the first `begin` tokens -> those of the first `end` ones
template <PackPrompt* kKernel, PromptBytes* kBytes>
void pack_prompt(const TreeOptions& options, const Tensor& copies, const Tensor& k_pool, const Tensor& v_pool,
                 const Tensor& block_table, int64_t num_heads, int64_t begin, int64_t end, int64_t capacity,
                 int64_t page_size) {
  check_sequences(kPackOp, {k_pool, v_pool, block_table, kNoTensor, page_size}, options, "end", end);
  check_heads(kPackOp, "num_heads", num_heads, k_pool.sym_size(1));
  check_copies(kPackOp, copies, k_pool);
  TORCH_CHECK_VALUE(begin >= 0 && begin <= end, kPackOp, ": begin must lie between 0 and end = ", end,
                    ", got ", begin);
  check_capacity(kPackOp, "capacity", capacity, std::max<int64_t>(end, 1));
  check_disjoint(kPackOp, "copies", copies, "k_pool", k_pool);
  check_disjoint(kPackOp, "copies", copies, "v_pool", v_pool);
  check_disjoint(kPackOp, "copies", copies, "block_table", block_table);
  if constexpr (kKernel != nullptr) {
    const AttentionProblem problem =
        problem_of(k_pool, v_pool.size(3), block_table.size(0), num_heads, end, end, options);
    check_copy_bytes<kBytes>(kPackOp, copies, problem, k_pool, capacity);
    if (copies.numel() > 0 && end > 0) {
      const Tensor table = block_table.contiguous();
      const Pools pages = {k_pool, v_pool, table, kNoTensor, page_size};
      kKernel(pages, layout_of(pages, options), {copies, problem, begin, capacity});
    }
  }
}

// k, v = (pool[block_table].tokens[:length] for pool in (k_pool, v_pool))
// attention_rows(q, k, v, [length - n], ..., store_parents=store_lists), its lists as [layers, B, ceil(n / s), H_kv, k]
template <Prompt* kKernel, PromptBytes* kBytes>
AttentionRows prompt(const TreeOptions& options, const Tensor& q, const Tensor& k_pool, const Tensor& v_pool,
                     const Tensor& block_table, int64_t length, const OptionalTensor& copies,
                     int64_t capacity, bool store_lists, int64_t page_size) {
  const int64_t selection_stride = options.selection_stride;
  check_sequences(kPromptOp, {k_pool, v_pool, block_table, kNoTensor, page_size}, options, "length", length);
  check_rank(kPromptOp, "q", q, 4, "[B, n, H, K]");
  check_same_dtype(kPromptOp, "q", q, "k_pool", k_pool);
  check_same_device(kPromptOp, "q", q, "k_pool", k_pool);
  check_size(kPromptOp, "q", q, 0, block_table.sym_size(0), "B of block_table");
  check_size(kPromptOp, "q", q, 3, k_pool.sym_size(3), "K of k_pool");
  check_heads(kPromptOp, "H of q", q.sym_size(2), k_pool.sym_size(1));
  const SymInt start = length - q.sym_size(1);
  TORCH_CHECK_VALUE(holds(start.sym_ge(0)), kPromptOp, ": q must have at most length = ", length,
                    " rows, got ", q.sym_sizes());
  TORCH_CHECK_VALUE(selection_stride == 1 || same_size(start % selection_stride, 0), kPromptOp,
                    ": length less the rows of q must be a multiple of selection_stride = ", selection_stride,
                    ", got ", length, " and ", q.sym_sizes());
  if (copies.has_value()) {
    check_copies(kPromptOp, *copies, k_pool);
    check_capacity(kPromptOp, "capacity", capacity, std::max<int64_t>(length, 1));
  }
  const SymInt kv_heads = k_pool.sym_size(1);
  const int64_t layers = store_lists ? tree_attention::depth_of(length, options) : 0;
  const std::array<SymInt, 3> rows = {q.sym_size(0), q.sym_size(1), q.sym_size(2)};
  const std::array<SymInt, 5> lists = {layers, rows[0], tree_attention::list_rows(rows[1], selection_stride),
                                       kv_heads, options.top_k};
  const AttentionRows outputs = {
      new_tensor({rows[0], rows[1], rows[2], v_pool.sym_size(3)}, q.scalar_type(), q),
      new_tensor(rows, tree_attention::state_dtype(q), q),
      new_tensor(rows, tree_attention::state_dtype(q), q), new_tensor(lists, at::kInt, q)};
  if constexpr (kKernel != nullptr) {
    const AttentionProblem problem =
        problem_of(k_pool, v_pool.size(3), q.size(0), q.size(2), length, q.size(1), options);
    if (copies.has_value()) {
      check_copy_bytes<kBytes>(kPromptOp, *copies, problem, k_pool, capacity);
    }
    if (std::get<0>(outputs).numel() > 0) {
      const Tensor table = block_table.contiguous();
      const Pools pages = {k_pool, v_pool, table, kNoTensor, page_size};
      kKernel(pages, layout_of(pages, options),
              {tree_attention::unit_last(q), problem, copies, capacity, options, outputs});
    }
  }
  return outputs;
}

// The first `length` tokens [B, length, H_kv, D] of sequences.
Tensor tokens_of(const Tensor& pool, const Tensor& pages, int64_t page_size, int64_t length) {
  const auto whole = [&](int64_t elements) { return elements * pool.element_size() % 16 == 0; };
  const bool wide =
      whole(pool.size(3)) && whole(pool.storage_offset());  // copies are faster in wide elements
  const Tensor rows = wide ? pool.view(at::kComplexDouble) : pool;
  const Tensor gathered = rows.transpose(1, 2).narrow(1, 0, page_size).index_select(0, pages.flatten());
  return gathered.view(pool.scalar_type()).unflatten(0, pages.sizes()).flatten(1, 2).narrow(1, 0, length);
}

}  // namespace

void prompt_from_tokens(const Pools& pages, const PromptCall& call,
                        tree_attention::AttentionForward* kernel) {
  const int64_t length = call.problem.num_keys;
  const Tensor table = pages.block_table.narrow(1, 0, ceil_div(length, pages.page_size));
  const Tensor k = tokens_of(pages.keys, table, pages.page_size, length);
  const Tensor v = tokens_of(pages.values, table, pages.page_size, length);
  const auto& [out, gmax, gsum, lists] = call.outputs;
  const SymInt start = call.problem.args.starts.front();
  const std::vector<Tensor> layers = lists.unbind(0);
  const AttentionArgs args = tree_attention::resolve_options(kPromptOp, call.options, k, start, layers);
  tree_attention::forward_by_depth(kernel, call.options, args, call.q, tree_attention::unit_last(k),
                                   tree_attention::unit_last(v), out, gmax, gsum, layers);
}

// ---- CPU: its kernels read no copies

int64_t prompt_bytes_cpu(const Tensor& /*keys*/, const AttentionProblem& /*problem*/) {
  return 0;
}

void pack_prompt_cpu(const Pools& /*pages*/, const PageLayout& /*layout*/, const PackCall& /*call*/) {}

void prompt_cpu(const Pools& pages, const PageLayout& layout, const PromptCall& call) {
  const int64_t used = ceil_div(call.problem.num_keys, layout.page_size);
  const auto table = pages.block_table.accessor<int32_t, 2>();
  for (int64_t b = 0; b < table.size(0); ++b) {
    for (int64_t i = 0; i < used; ++i) {
      TORCH_CHECK_INDEX(table[b][i] >= 0 && table[b][i] < pages.keys.size(0), kPromptOp, ": block_table[", b,
                        "][", i, "] must be a page of the pool, 0 ... ", pages.keys.size(0) - 1, ", got ",
                        table[b][i]);
    }
  }
  prompt_from_tokens(pages, call, tree_attention::attention_forward_cpu);
}

// ---- registration

namespace {

template <PromptBytes* kBytes, PackPrompt* kPack, Prompt* kPrompt>
void register_prompt(const OpKernels& kernels) {
  kernels.impl("_tree_cache_prompt_bytes", TORCH_FN(kPacked<prompt_bytes<kBytes>>));
  kernels.impl("_tree_cache_pack_prompt_", TORCH_FN((kPacked<pack_prompt<kPack, kBytes>>)));
  kernels.impl("_tree_cache_prompt", TORCH_FN((kPacked<prompt<kPrompt, kBytes>>)));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(HTREE_NAMESPACE, library) {
  const std::string options = tree_attention::kPackedSchema;
  const std::string pools = "Tensor k_pool, Tensor v_pool, ";
  const std::string bytes = "_tree_cache_prompt_bytes(" + pools +
                            "int num_sequences, int num_heads, int capacity, " + options + ") -> int";
  const std::string pack = "_tree_cache_pack_prompt_(Tensor(a!) copies, " + pools +
                           "Tensor block_table, int num_heads, int begin, int end, int capacity, "
                           "int page_size, " +
                           options + ") -> ()";
  const std::string prompt = "_tree_cache_prompt(Tensor q, " + pools +
                             "Tensor block_table, int length, Tensor? copies, int capacity, "
                             "bool store_lists, int page_size, " +
                             options + ") -> (Tensor out, Tensor gmax, Tensor gsum, Tensor lists)";
  define_ops(library, {bytes, pack, prompt});
  register_prompt<prompt_bytes_cpu, pack_prompt_cpu, prompt_cpu>({library, DispatchKey::CPU});
#if defined(HTREE_WITH_CUDA)
  register_prompt<prompt_bytes_cuda, pack_prompt_cuda, prompt_cuda>({library, DispatchKey::CUDA});
#endif
  register_prompt<nullptr, nullptr, nullptr>({library, DispatchKey::Meta});
  register_no_gradient(library, {"_tree_cache_prompt_bytes", "_tree_cache_prompt"});
}

}  // namespace htree::tree_cache
