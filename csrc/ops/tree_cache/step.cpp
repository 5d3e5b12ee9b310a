// The ops that a cache is served with, each one call with one set of checks: new tokens into their pages and the rows of
// the newest ones; tokens that are taken back. docs/semantics/tree_cache.md §7.4.
#include <array>
#include <string>

#include "host/check.h"
#include "host/overlap.h"
#include "host/registration.h"
#include "ops/tree_cache/index/index_keys.h"
#include "ops/tree_cache/tree_cache.h"

namespace htree::tree_cache {
namespace {

using at::TensorList;
using OptionalTensor = std::optional<Tensor>;
using tree_attention::kPacked;
using StepOutputs = std::tuple<Tensor, Tensor>;

constexpr const char* kStepOp = "tree_cache_step_";
constexpr const char* kTruncateOp = "tree_cache_truncate_";

// ---- what a cache keeps of its sequences, in the order of the schema's `state`

struct SequenceState {
  const Tensor& lengths;   // int32 [B]
  const Tensor& errors;    // int32 [B], LengthError
  const Tensor& plan;      // int32 [2, B]: lengths before the step, tokens that it takes
  const Tensor& list_pos;  // int32 [B, ring]
  const Tensor& lists;     // int32 [B, ring, L, H_kv, k]
};

SequenceState sequence_state(const char* op, TensorList state, const Tensor& block_table,
                             const Tensor& counts) {
  TORCH_CHECK_VALUE(state.size() == 5, op, ": state must have 5 tensors, got ", state.size());
  const SymInt batch = block_table.sym_size(0);
  check_rank(op, "list_pos", state[3], 2, "[B, ring]");
  const std::array<std::tuple<const char*, const Tensor&, std::array<SymInt, 2>, size_t, const char*>, 5>
      all = {{
          {"lengths", state[0], {batch}, 1, "[B]"},
          {"errors", state[1], {batch}, 1, "[B]"},
          {"plan", state[2], {2, batch}, 2, "[2, B]"},
          {"list_pos", state[3], {batch, state[3].sym_size(1)}, 2, "[B, ring]"},
          {"counts", counts, {batch}, 1, "[B]"},
      }};
  for (const auto& [name, tensor, shape, rank, meaning] : all) {
    tree_attention::check_indices(op, name, tensor, {shape.data(), rank}, meaning, "block_table",
                                  block_table);
    check_contiguous(op, name, tensor);
  }
  for (size_t i = 0; i < all.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      check_disjoint(op, std::get<0>(all[j]), std::get<1>(all[j]), std::get<0>(all[i]), std::get<1>(all[i]));
    }
  }
  return {state[0], state[1], state[2], state[3], state[4]};
}

void check_leaves(const char* op, TensorList leaves) {
  TORCH_CHECK_VALUE(leaves.empty() || leaves.size() == 7, op, ": leaves must have 0 or 7 tensors, got ",
                    leaves.size());
}

int32_t* numbers(const Tensor& x) {
  return x.mutable_data_ptr<int32_t>();
}

SequenceLengths pointers(const SequenceState& state, TensorList leaves) {
  return {.lengths = numbers(state.lengths),
          .errors = numbers(state.errors),
          .plan = numbers(state.plan),
          .list_pos = numbers(state.list_pos),
          .tail_begin = leaves.empty() ? nullptr : numbers(leaves[6]),
          .num_sequences = static_cast<int>(state.lengths.numel()),
          .ring = static_cast<int>(state.list_pos.size(1))};
}

LengthStep length_step(const Tensor& counts, const Tensor& block_table, TensorList leaves, int64_t page_size,
                       const TreeOptions& options) {
  LengthStep step;
  step.counts = counts.const_data_ptr<int32_t>();
  step.block_table = block_table.const_data_ptr<int32_t>();
  step.max_pages = block_table.size(1);
  step.page_size = page_size;
  step.stride = options.selection_stride;
  step.rate = options.compression_rate;
  step.tail_tokens = leaves.empty() ? 0 : leaves[4].size(2);
  return step;
}

// The index keys, and behind them the scales of E4M3 codes.
IndexPool index_pages(TensorList index_pool) {
  return {index_pool[0], index_pool.size() == 2 ? index_pool[1] : Tensor()};
}

// What a call of a cache with an index has of it, and nothing of a call of another one.
void check_index(const char* op, const TreeOptions& options, const Pools& pools, TensorList index_pool,
                 const OptionalTensor& index_query, const OptionalTensor& q, const OptionalTensor& index_key,
                 const OptionalTensor& k, int64_t page_size) {
  TORCH_CHECK_VALUE(index_pool.size() < 3, op, ": index_pool must have 0 to 2 tensors, got ",
                    index_pool.size());
  const bool has_index = !index_pool.empty();
  TORCH_CHECK_VALUE(index_query.has_value() == (has_index && q.has_value()), op, ": index_query must ",
                    index_query.has_value() ? "be None where q or index_pool is missing, got a tensor"
                                            : "be given beside q and index_pool, got None");
  TORCH_CHECK_VALUE(index_key.has_value() == (has_index && k.has_value()), op, ": index_key must ",
                    index_key.has_value() ? "be None where k or index_pool is missing, got a tensor"
                                          : "be given beside k and index_pool, got None");
  if (!has_index) return;
  check_index_options(op, options);
  check_index_pool(op, pools, index_pages(index_pool), page_size);
  if (index_key.has_value())
    check_index_rows(op, "index_key", *index_key, "the new tokens of k", *k, index_pool[0]);
  for (const Tensor& of_index : index_pool) {
    for (const auto& [name, pool] : {std::pair{"k_pool", pools.keys}, std::pair{"v_pool", pools.values}}) {
      check_disjoint(op, name, pool, "index_pool", of_index);
    }
    if (index_key.has_value()) check_disjoint(op, "index_pool", of_index, "index_key", *index_key);
  }
  if (index_pool.size() == 2) check_disjoint(op, "index_pool", index_pool[0], "index_scales", index_pool[1]);
}

Tensor joined(const Tensor& x) {
  return tree_attention::unit_last(x.flatten(0, 1));
}

// ---- a step

// The kernels of a device.
struct Kernels {
  Lengths* lengths;
  Append* append;
  AppendIndex* append_index;
  Attention* attention;
};

// New tokens of sequences that had plan[0] tokens, of which plan[1] count.
void append_rows(const Kernels& kernels, const Pools& pools, TensorList index_pool,
                 const SequenceState& state, const PageLayout& layout, const Tensor& k, const Tensor& v,
                 const OptionalTensor& index_key, const Tensor& cu_rows) {
  const Tensor before = state.plan.select(0, 0);
  const Pools held = {pools.keys, pools.values, pools.block_table, before, pools.page_size, pools.leaves};
  const OptionalTensor counts = state.plan.select(0, 1);
  const AppendCall call = {joined(k), joined(v), cu_rows, counts, k.size(1), kStepOp};
  try {
    kernels.append(held, layout, call);
  } catch (...) {  // on the CPU, of a table that somebody has broken: nothing was written
    state.lengths.copy_(before);
    throw;
  }
  if (!index_pool.empty()) {
    const Tensor rows = joined(*index_key);
    kernels.append_index(held, index_pages(index_pool), layout,
                         {rows, rows, cu_rows, counts, k.size(1), kStepOp});
  }
}

// if k: lengths, plan = advance(counts); tree_cache_append_(k, v) of the tokens that were taken, and their index_key
// if q: out, lse, lists, list_pos = tree_cache_attention(q)
template <const Kernels* kKernels>
StepOutputs step(const TreeOptions& options, const Tensor& k_pool, const Tensor& v_pool, TensorList leaves,
                 TensorList index_pool, TensorList state_list, const Tensor& block_table,
                 const OptionalTensor& q, const OptionalTensor& k, const OptionalTensor& v,
                 const OptionalTensor& index_query, const OptionalTensor& index_key, const Tensor& counts,
                 bool ragged, const Tensor& cu_rows, const OptionalTensor& rope_table, int64_t capacity,
                 int64_t page_size) {
  constexpr const char* kOp = kStepOp;
  check_leaves(kOp, leaves);
  check_cache_options(kOp, options);
  const std::optional<PackedLeaves> tokens = packed_leaves(leaves);
  check_pools(kOp, {k_pool, v_pool, block_table, kNoTensor, page_size, tokens}, options);
  const SequenceState state = sequence_state(kOp, state_list, block_table, counts);
  check_contiguous(kOp, "block_table", block_table);
  TORCH_CHECK_VALUE(k.has_value() == v.has_value(), kOp, ": k and v must be given together, got only one");
  const Pools pools = {k_pool, v_pool, block_table, state.lengths, page_size, tokens};
  const OptionalTensor row_counts = ragged ? OptionalTensor(counts) : OptionalTensor();
  if (k.has_value()) {
    check_append(kOp, pools, options, *k, *v, cu_rows, row_counts, std::nullopt);
  }
  check_index(kOp, options, pools, index_pool, index_query, q, index_key, k, page_size);
  const bool strided = options.selection_stride > 1;
  const OptionalTensor ring = strided ? OptionalTensor(state.lists) : OptionalTensor();
  const OptionalTensor leaders = strided ? OptionalTensor(state.list_pos) : OptionalTensor();
  std::optional<IndexInputs> index;
  if (index_query.has_value()) index = {*index_query, index_pages(index_pool)};
  AttentionOutputs outputs;
  if (q.has_value()) {
    if (k.has_value()) {
      check_size(kOp, "k", *k, 1, q->sym_size(1), "n of q");
    }
    outputs =
        prepare_attention(kOp, pools, {*q, cu_rows, ring, leaders, row_counts, rope_table, index}, options);
  }
  auto& [out, lse, new_lists, new_list_pos] = outputs;
  if constexpr (kKernels != nullptr) {
    const PageLayout layout = layout_of(pools, options);
    LengthStep lengths = length_step(counts, block_table, leaves, page_size, options);
    lengths.num_pages = k_pool.size(0);
    lengths.capacity = capacity;
    lengths.appends = k.has_value() && k->size(1) > 0;
    lengths.attends = q.has_value() && strided;
    if (counts.numel() > 0 && (lengths.appends || lengths.attends)) {
      kKernels->lengths(pointers(state, leaves), lengths, /*truncates=*/false, k_pool);
    }
    if (counts.numel() > 0 && lengths.appends) {
      append_rows(*kKernels, pools, index_pool, state, layout, *k, *v, index_key, cu_rows);
    }
    if (q.has_value()) {
      if (index.has_value()) index->query = joined(index->query);
      kKernels->attention(pools, layout, {joined(*q), cu_rows, ring, leaders, row_counts, rope_table, index},
                          tree_attention::resolve(options, q->size(3)),
                          {out.flatten(0, 1), lse.flatten(0, 1), new_lists, new_list_pos});
      if (strided) {
        state.lists.copy_(new_lists);
        state.list_pos.copy_(new_list_pos);
      }
    }
  }
  if (!q.has_value()) {
    out = new_tensor({0}, k_pool.scalar_type(), k_pool);
    lse = new_tensor({0}, tree_attention::state_dtype(k_pool), k_pool);
  }
  return {out, lse};
}

// ---- a truncation

// lengths[b] = counts[b] where 0 <= counts[b] <= lengths[b]; leaders at or behind it leave list_pos
template <const Kernels* kKernels>
void truncate(const TreeOptions& options, TensorList leaves, TensorList state_list, const Tensor& block_table,
              const Tensor& counts, const Tensor& own_from, int64_t page_size) {
  constexpr const char* kOp = kTruncateOp;
  check_leaves(kOp, leaves);
  check_cache_options(kOp, options);
  check_rank(kOp, "block_table", block_table, 2, "[B, max_pages]");
  check_at_least(kOp, "page_size", page_size, 1);
  const SequenceState state = sequence_state(kOp, state_list, block_table, counts);
  tree_attention::check_indices(kOp, "own_from", own_from, {block_table.sym_size(0)}, "[B]", "block_table",
                                block_table);
  check_contiguous(kOp, "own_from", own_from);
  if constexpr (kKernels != nullptr) {
    if (counts.numel() > 0) {
      LengthStep step = length_step(counts, block_table, leaves, page_size, options);
      step.own_from = own_from.const_data_ptr<int32_t>();
      kKernels->lengths(pointers(state, leaves), step, /*truncates=*/true, counts);
    }
  }
}

constexpr Kernels kCpu = {lengths_cpu, append_cpu, append_index_cpu, attention_cpu};
#if defined(HTREE_WITH_CUDA)
constexpr Kernels kCuda = {lengths_cuda, append_cuda, append_index_cuda, attention_cuda};
#endif

template <const Kernels* kKernels>
void register_kernels(const OpKernels& kernels) {
  kernels.impl("_tree_cache_step_", TORCH_FN(kPacked<step<kKernels>>));
  kernels.impl("_tree_cache_truncate_", TORCH_FN(kPacked<truncate<kKernels>>));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(HTREE_NAMESPACE, library) {
  const std::string options = tree_attention::kPackedSchema;
  const std::string step =
      "_tree_cache_step_(Tensor(a!) k_pool, Tensor(b!) v_pool, Tensor(c!)[] leaves, "
      "Tensor(d!)[] index_pool, Tensor(e!)[] state, Tensor block_table, Tensor? q, Tensor? k, Tensor? v, "
      "Tensor? index_query, Tensor? index_key, Tensor counts, bool ragged, Tensor cu_rows, "
      "Tensor? rope_table, int capacity, int page_size, " +
      options + ") -> (Tensor out, Tensor lse)";
  const std::string truncate =
      "_tree_cache_truncate_(Tensor(a!)[] leaves, Tensor(b!)[] state, Tensor block_table, Tensor counts, "
      "Tensor own_from, int page_size, " +
      options + ") -> ()";
  define_ops(library, {step, truncate});
  register_kernels<&kCpu>({library, DispatchKey::CPU});
#if defined(HTREE_WITH_CUDA)
  register_kernels<&kCuda>({library, DispatchKey::CUDA});
#endif
  register_kernels<nullptr>({library, DispatchKey::Meta});
}

}  // namespace htree::tree_cache
