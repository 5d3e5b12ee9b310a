#include "ops/tree_attention/varlen/varlen_plan.h"

#include <ATen/ops/argsort.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cummax.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <array>
#include <limits>

namespace htree::tree_attention {
namespace {

// The numbers of a call.
struct VarlenCall {
  int64_t num_documents, num_queries, num_keys, max_q, max_k, stride;
  VarlenProblem problem;
};

VarlenCall call_of(const PackedInputs& inputs, const Documents& documents, const TreeOptions& options) {
  VarlenCall call;
  call.num_documents = documents.cu_seq_q.size(0) - 1;
  call.num_queries = inputs.query.size(0);
  call.num_keys = inputs.key.size(0);
  // No document is longer than all rows, and lengths are int32.
  call.max_q = std::min(documents.max_q.guard_int(__FILE__, __LINE__), call.num_queries);
  call.max_k = std::min(documents.max_k.guard_int(__FILE__, __LINE__), call.num_keys);
  call.stride = options.selection_stride;
  call.problem = {inputs.query.size(1), options.compression_rate, options.max_top_nodes, options.top_k};
  return call;
}

// ---- without the host

// Offsets that ascend from 0 to at most `rows` whatever the caller wrote, so that no row has two documents.
Tensor ascending(const Tensor& offsets, int64_t rows) {
  const Tensor ends = offsets.slice(0, 1).clamp(0, rows);
  return std::get<0>(at::cummax(at::cat({at::zeros({1}, offsets.options()), ends}), 0));
}

VarlenPlan plan_on_device(const VarlenCall& call, const Documents& documents) {
  VarlenPlan plan;
  plan.groups = group_by_rank(call.num_documents, call.num_keys, call.max_k);
  plan.fills = true;
  const bool same = documents.cu_seq_q.is_same(documents.cu_seq_k) && call.num_queries == call.num_keys;
  plan.starts_q = ascending(documents.cu_seq_q, call.num_queries);
  plan.starts_k = same ? plan.starts_q : ascending(documents.cu_seq_k, call.num_keys);
  const auto begins = [](const Tensor& starts) { return starts.slice(0, 0, starts.size(0) - 1); };
  const auto changed = [&](const Tensor& starts, const Tensor& given) {
    const Tensor moved = starts.ne(given);
    return begins(moved).logical_or(moved.slice(0, 1));
  };
  const Tensor num_queries = plan.starts_q.diff(), num_keys = same ? num_queries : plan.starts_k.diff();
  const Tensor offset = num_keys.sub(num_queries);
  Tensor broken = changed(plan.starts_q, documents.cu_seq_q).logical_or(num_queries.gt(call.max_q));
  if (!same) {
    broken = broken.logical_or(changed(plan.starts_k, documents.cu_seq_k)).logical_or(offset.lt(0));
  }
  broken = broken.logical_or(num_keys.gt(call.max_k));
  if (call.stride > 1 && !same) {
    broken = broken.logical_or(offset.remainder(call.stride).ne(0).logical_and(num_queries.gt(0)));
  }
  plan.kinds = broken.to(at::kInt);
  const Tensor query_count = num_queries.masked_fill(broken, 0), key_count = num_keys.masked_fill(broken, 0);
  plan.table = at::stack(
      {begins(plan.starts_q), offset, query_count, begins(plan.starts_k), at::zeros_like(offset), key_count},
      1);
  const bool all_alike = plan.groups.size() == 1 && plan.groups[0].count == call.num_documents;
  if (!all_alike && call.num_documents > 0) {
    const Tensor order = at::argsort(key_count, /*stable=*/true, /*dim=*/0, /*descending=*/true);
    plan.table = plan.table.index_select(0, order);
  }
  return plan;
}

// ---- with the host

// int32 numbers on the device; the copy does not wait for it.
Tensor upload(const std::vector<int32_t>& numbers, const Tensor& like) {
  const auto size = static_cast<int64_t>(numbers.size());
  const Tensor staged = at::empty({size}, at::TensorOptions().dtype(at::kInt).pinned_memory(like.is_cuda()));
  std::copy(numbers.begin(), numbers.end(), staged.mutable_data_ptr<int32_t>());
  return staged.to(like.device(), at::kInt, /*non_blocking=*/true);
}

// `refuses`: a broken document is an error.
VarlenPlan plan_on_host(const char* op, const VarlenCall& call, const Documents& documents,
                        const Tensor& like, Grouping grouping, bool refuses) {
  const Tensor both = at::cat({documents.cu_seq_q, documents.cu_seq_k}).cpu();
  const auto* of_queries = both.const_data_ptr<int32_t>();
  const int32_t* of_keys = of_queries + call.num_documents + 1;
  // Who knows only how many documents there may be ends with empty ones, often as many as there are rows. The first one
  // stays, since an offset that does not begin with 0 breaks it.
  int64_t count = call.num_documents;
  while (count > 1 && of_queries[count] == of_queries[count - 1] && of_keys[count] == of_keys[count - 1]) {
    --count;
  }
  const int64_t size = count + 1;
  const HostOffsets queries = host_offsets(of_queries, size, call.num_queries);
  const HostOffsets keys = host_offsets(of_keys, size, call.num_keys);
  if (refuses) {
    refuse_offsets(op, "cu_seq_q", queries, "query", call.num_queries);
    refuse_offsets(op, "cu_seq_k", keys, "key", call.num_keys);
  }
  std::vector<VarlenDocument> fitting;
  std::vector<int32_t> kinds(count, kInGroup);
  VarlenPlan plan;
  plan.fills = queries.starts.back() < call.num_queries || keys.starts.back() < call.num_keys;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t num_queries = queries.count(i), num_keys = keys.count(i);
    if (refuses) refuse_document(op, i, num_queries, num_keys, documents, call.stride);
    const bool fits = queries.kept(i) && keys.kept(i) && num_queries <= call.max_q &&
                      num_keys <= call.max_k && num_queries <= num_keys &&
                      (num_queries == 0 || (num_keys - num_queries) % call.stride == 0);
    if (fits && num_queries > 0) {
      fitting.push_back({queries.starts[i], num_queries, keys.starts[i], num_keys});
    } else if (num_queries + num_keys > 0) {
      kinds[i] = fits ? kUnused : kBroken;
      plan.fills = true;
    }
  }
  plan.groups =
      grouping == Grouping::kLength ? group_by_length(fitting, call.problem) : group_by_document(fitting);
  const auto rows = static_cast<int64_t>(fitting.size());
  std::vector<int32_t> table(rows * kTableColumns);
  for (const VarlenGroup& group : plan.groups) {
    for (int64_t i = group.first; i < group.first + group.count; ++i) {
      const VarlenDocument& x = fitting[i];
      const int64_t shift = x.offset() - (group.num_keys - group.num_queries);
      const std::array<int64_t, kTableColumns> entry = {x.query_begin, shift, x.num_queries,
                                                        x.key_begin,   0,     x.num_keys};
      std::copy(entry.begin(), entry.end(), table.begin() + i * kTableColumns);
    }
  }
  if (plan.fills) {
    for (const auto* list : {&queries.starts, &keys.starts}) {
      table.insert(table.end(), list->begin(), list->end());
    }
    table.insert(table.end(), kinds.begin(), kinds.end());
  }
  const bool pads =
      std::any_of(plan.groups.begin(), plan.groups.end(), [](const VarlenGroup& x) { return !x.in_place; });
  if (!pads && !plan.fills) return plan;
  const Tensor uploaded = upload(table, like);
  plan.table = uploaded.narrow(0, 0, rows * kTableColumns).view({rows, kTableColumns});
  if (plan.fills) {
    const Tensor rest = uploaded.slice(0, rows * kTableColumns);
    plan.starts_q = rest.narrow(0, 0, size);
    plan.starts_k = rest.narrow(0, size, size);
    plan.kinds = rest.narrow(0, 2 * size, count);
  }
  return plan;
}

Grouping choose_grouping(const VarlenKernels& kernels, const char* op, const PackedInputs& inputs,
                         const VarlenCall& call, const TreeOptions& options, std::string_view grouping) {
  // With importance "lse" the unfinished node at the end of a document counts, and padding would be part of it.
  const bool pads = options.importance != Importance::kLse;
  TORCH_CHECK_VALUE(pads || grouping != "rank", op,
                    ": importance must not be 'lse' where grouping is 'rank'");
  if (grouping == "rank") return Grouping::kRank;
  if (grouping == "document" || !pads || (grouping == "auto" && kernels.on_host)) return Grouping::kDocument;
  if (grouping == "length") return Grouping::kLength;
  const int64_t rows = padded_rows(group_by_rank(call.num_documents, call.num_keys, call.max_k));
  const bool cheap = static_cast<double>(rows) <= kMostRankRows * static_cast<double>(call.num_queries);
  return cheap || kernels.records_graph(inputs.query) ? Grouping::kRank : Grouping::kLength;
}

}  // namespace

VarlenPlan plan_varlen(const VarlenKernels& kernels, const char* op, const PackedInputs& inputs,
                       const Documents& documents, const TreeOptions& options, std::string_view grouping) {
  const VarlenCall call = call_of(inputs, documents, options);
  const Grouping chosen = choose_grouping(kernels, op, inputs, call, options, grouping);
  if (chosen == Grouping::kRank) return plan_on_device(call, documents);
  TORCH_CHECK(
      !kernels.records_graph(inputs.query), op,
      ": the lengths have to be read on the host, which a CUDA graph that is being recorded does not allow");
  return plan_on_host(op, call, documents, inputs.query, chosen,
                      kernels.on_host && chosen == Grouping::kDocument);
}

}  // namespace htree::tree_attention
