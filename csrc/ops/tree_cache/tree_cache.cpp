// Schemas, CPU, CUDA and Meta kernels of the tree cache.
// docs/semantics/tree_cache.md §7; docs/semantics/conventions.md §0.5.
#include "ops/tree_cache/tree_cache.h"

#include <algorithm>
#include <iterator>
#include <string>

#include "host/no_gradient.h"
#include "host/registration.h"
#include "ops/tree_cache/index/index_keys.h"

namespace htree::tree_cache {
namespace {

using OptionalTensor = std::optional<Tensor>;
using tree_attention::kPacked;

OptionalTensor dense(const OptionalTensor& x) {
  return x.has_value() ? OptionalTensor(x->contiguous()) : OptionalTensor();
}

// for b: for i in range(new tokens of b): t = lengths[b] + i
//   page = block_table[b, t // P]; k_pool[page, :, t % P] = k[cu_new[b] + i]; v_pool likewise
//   for l in 1 ... L-1 where (t + 1) % r**l == 0: node (t + 1) // r**l - 1 of layer l = mean of its r children
//   where selection_span and (t + 1) % c == 0: span mean (t + 1) // c - 1 = mean of the last c keys
// with leaves: k_codes[page, :, t % P], k_scales[page, :, t % P] = quantised k[cu_new[b] + i] in the place of the
//   row of k_pool, and k_tail[b, :, t % S] = k[cu_new[b] + i], from which nodes are made; values likewise
template <Append* kKernel>
void append(const TreeOptions& options, const Tensor& k_pool, const Tensor& v_pool, at::TensorList leaves,
            const Tensor& k, const Tensor& v, const Tensor& block_table, const Tensor& lengths,
            const Tensor& cu_new, const OptionalTensor& new_lengths, std::optional<SymInt> max_new,
            int64_t page_size) {
  const char* const op = leaves.empty() ? "tree_cache_append_" : "tree_cache_append_packed_";
  TORCH_CHECK_VALUE(leaves.empty() || leaves.size() == 6, op, ": leaves must have 0 or 6 tensors, got ",
                    leaves.size());
  check_cache_options(op, options);
  const std::optional<PackedLeaves> tokens = packed_leaves(leaves);
  const Pools pools = {k_pool, v_pool, block_table, lengths, page_size, tokens};
  check_pools(op, pools, options);
  check_append(op, pools, options, k, v, cu_new, new_lengths, max_new);
  if constexpr (kKernel != nullptr) {
    const int64_t most = max_new.has_value() ? max_new->guard_int(__FILE__, __LINE__) : k.size(0);
    // On the CPU a bound below the new tokens is refused, 0 as well.
    if (k.size(0) > 0 && (most > 0 || k.is_cpu()) && lengths.numel() > 0) {
      const Tensor table = block_table.contiguous(), held = lengths.contiguous();
      kKernel({k_pool, v_pool, table, held, page_size, tokens}, layout_of(pools, options),
              {tree_attention::unit_last(k), tree_attention::unit_last(v), cu_new.contiguous(),
               dense(new_lengths), std::min(most, k.size(0)), op});
    }
  }
}

// for b, for each of the queries, which are the last tokens t of lengths[b]:
//   row t of tree_attention over k[:t + 1], v[:t + 1] with the lists of the leader t - t % s, which come from
//   this call, or from lists[b, j] where list_pos[b, j] is the leader; with an index those of
//   tree_attention(..., index=(index_query, index_key[:t + 1]))
template <Attention* kKernel>
AttentionOutputs attention(const TreeOptions& options, const Tensor& q, const Tensor& k_pool,
                           const Tensor& v_pool, const Tensor& block_table, const Tensor& lengths,
                           const Tensor& cu_q, const OptionalTensor& lists, const OptionalTensor& list_pos,
                           const OptionalTensor& q_lengths, const OptionalTensor& rope_table,
                           const OptionalTensor& k_codes, const OptionalTensor& k_scales,
                           const OptionalTensor& v_codes, const OptionalTensor& v_scales,
                           const OptionalTensor& index_query, const OptionalTensor& index_pool,
                           const OptionalTensor& index_scales, int64_t page_size) {
  constexpr const char* kOp = "tree_cache_attention";
  const OptionalTensor* packed[] = {&k_codes, &k_scales, &v_codes, &v_scales};
  const auto given = std::count_if(std::begin(packed), std::end(packed),
                                   [](const OptionalTensor* x) { return x->has_value(); });
  TORCH_CHECK_VALUE(given == 0 || given == 4, kOp,
                    ": k_codes, k_scales, v_codes and v_scales must be given together, got ", given,
                    " of them");
  std::optional<PackedLeaves> tokens;
  if (given == 4)
    tokens.emplace(PackedLeaves{*k_codes, *k_scales, *v_codes, *v_scales, kNoTensor, kNoTensor});
  const Pools pools = {k_pool, v_pool, block_table, lengths, page_size, tokens};
  check_cache_options(kOp, options);
  if (index_pool.has_value()) check_index_options(kOp, options);  // a span asks for other pools
  check_pools(kOp, pools, options);
  TORCH_CHECK_VALUE(index_query.has_value() == index_pool.has_value(), kOp,
                    ": index_query and index_pool must be given together, got only one of them");
  TORCH_CHECK_VALUE(index_pool.has_value() || !index_scales.has_value(), kOp,
                    ": index_scales must be None where index_pool is, got a tensor");
  std::optional<IndexInputs> index;
  if (index_pool.has_value()) index = {*index_query, {*index_pool, index_scales.value_or(Tensor())}};
  AttentionOutputs outputs =
      prepare_attention(kOp, pools, {q, cu_q, lists, list_pos, q_lengths, rope_table, index}, options);
  if constexpr (kKernel != nullptr) {
    const Tensor table = block_table.contiguous(), held = lengths.contiguous();
    if (index.has_value()) index->query = tree_attention::unit_last(index->query);
    kKernel({k_pool, v_pool, table, held, page_size, tokens}, layout_of(pools, options),
            {tree_attention::unit_last(q), cu_q.contiguous(), dense(lists), dense(list_pos), dense(q_lengths),
             rope_table, index},
            tree_attention::resolve(options, q.size(2)), outputs);
  }
  return outputs;
}

// for i where pages[0, i] >= 0: k_pool[pages[1, i]] = k_pool[pages[0, i]]; v_pool likewise
template <Copy* kKernel>
void copy(const Tensor& k_pool, const Tensor& v_pool, const Tensor& page_pairs) {
  check_copy(k_pool, v_pool, page_pairs);
  if constexpr (kKernel != nullptr) {
    if (page_pairs.numel() > 0 && k_pool.numel() + v_pool.numel() > 0) {
      kKernel(k_pool, v_pool, page_pairs.contiguous());
    }
  }
}

template <Append* kAppend, Attention* kAttention, Copy* kCopy>
void register_device(const OpKernels& kernels) {
  kernels.impl("_tree_cache_append_", TORCH_FN(kPacked<append<kAppend>>));
  kernels.impl("_tree_cache_attention", TORCH_FN(kPacked<attention<kAttention>>));
  kernels.impl("tree_cache_copy_", TORCH_FN(copy<kCopy>));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(HTREE_NAMESPACE, library) {
  const std::string options = tree_attention::kPackedSchema;
  const std::string append =
      "_tree_cache_append_(Tensor(a!) k_pool, Tensor(b!) v_pool, Tensor(c!)[] leaves, Tensor k, Tensor v, "
      "Tensor block_table, Tensor lengths, Tensor cu_new, Tensor? new_lengths, SymInt? max_new, "
      "int page_size, " +
      options + ") -> ()";
  const std::string attention =
      "_tree_cache_attention(Tensor q, Tensor k_pool, Tensor v_pool, Tensor block_table, Tensor lengths, "
      "Tensor cu_q, Tensor? lists, Tensor? list_pos, Tensor? q_lengths, Tensor? rope_table, Tensor? k_codes, "
      "Tensor? k_scales, Tensor? v_codes, Tensor? v_scales, Tensor? index_query, Tensor? index_pool, "
      "Tensor? index_scales, int page_size, " +
      options + ") -> (Tensor out, Tensor lse, Tensor lists, Tensor list_pos)";
  define_ops(library, {
                          append,
                          attention,
                          "tree_cache_copy_(Tensor(a!) k_pool, Tensor(b!) v_pool, Tensor pages) -> ()",
                      });
  register_device<append_cpu, attention_cpu, copy_cpu>({library, DispatchKey::CPU});
#if defined(HTREE_WITH_CUDA)
  register_device<append_cuda, attention_cuda, copy_cuda>({library, DispatchKey::CUDA});
#endif
  register_device<nullptr, nullptr, nullptr>({library, DispatchKey::Meta});
  register_no_gradient(library, {"_tree_cache_attention"});
}

}  // namespace htree::tree_cache
