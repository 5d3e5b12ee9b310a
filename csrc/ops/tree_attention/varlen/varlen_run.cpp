// Runs the groups of a plan, one after another, with the kernels of attention_forward and attention_backward.
#include <ATen/ops/empty.h>

#include <limits>
#include <vector>

#include "ops/tree_attention/listed_attention.h"
#include "ops/tree_attention/segments.h"
#include "ops/tree_attention/varlen/varlen_plan.h"

namespace htree::tree_attention {
namespace {

// The rows of one group, as batches [documents, rows, ...].
class GroupRows {
 public:
  enum Side { kQueries, kKeys };

  GroupRows(const VarlenKernels& kernels, const VarlenPlan& plan, const VarlenGroup& group)
      : kernels_(kernels), plan_(plan), group_(group) {}

  // `padding` is what rows that belong to no document hold. The rows are there after gather().
  Tensor take(const Tensor& packed, Side side, double padding = 0) {
    if (group_.in_place) return unit_last(view(packed, side));
    const Tensor batch = empty(packed, side);
    gathers_.push_back({packed, batch, table(side), padding});
    return batch;
  }
  void gather() {
    kernels_.gather(gathers_);
    gathers_.clear();
  }

  // Memory for an output that scatter() brings into `packed`.
  Tensor place(const Tensor& packed, Side side) {
    if (!packed.defined()) return {};
    if (group_.in_place) return view(packed, side);
    const Tensor batch = empty(packed, side);
    scatters_.push_back({packed, batch, table(side)});
    return batch;
  }
  void scatter() const { kernels_.scatter(scatters_); }

 private:
  int64_t rows(Side side) const { return side == kQueries ? group_.num_queries : group_.num_keys; }

  Tensor empty(const Tensor& packed, Side side) const {
    std::vector<int64_t> shape = {group_.count, rows(side)};
    shape.insert(shape.end(), packed.sizes().begin() + 1, packed.sizes().end());
    return at::empty(shape, packed.options());
  }

  Tensor view(const Tensor& packed, Side side) const {
    const int64_t begin = side == kQueries ? group_.query_begin : group_.key_begin;
    return packed.narrow(0, begin, group_.count * rows(side)).unflatten(0, {group_.count, rows(side)});
  }

  Tensor table(Side side) const {
    return plan_.table.narrow(0, group_.first, group_.count)
        .narrow(1, side == kQueries ? kQueryBegin : kKeyBegin, kTableColumns / 2);
  }

  const VarlenKernels& kernels_;
  const VarlenPlan& plan_;
  const VarlenGroup& group_;
  std::vector<RowCopy> gathers_, scatters_;
};

AttentionArgs group_args(const char* op, const TreeOptions& options, const Tensor& keys,
                         const VarlenGroup& group, at::TensorList lists) {
  return resolve_options(op, options, keys, {group.num_keys - group.num_queries}, lists);
}

// The lists of a group, one tensor per layer, that its index chooses; none without an index.
std::vector<Tensor> group_lists(const VarlenKernels& kernels, const char* op, const PackedInputs& inputs,
                                const TreeOptions& options, const VarlenGroup& group, GroupRows& batch) {
  std::vector<Tensor> lists;
  if (!inputs.index_query.defined()) return lists;
  const Tensor query = batch.take(inputs.index_query, GroupRows::kQueries);
  const Tensor key = batch.take(inputs.index_key, GroupRows::kKeys);
  batch.gather();
  const int64_t depth = depth_of(group.num_keys, options);
  const int64_t width = list_width(group.num_keys, options).expect_int();
  for (int64_t layer = 0; layer < depth; ++layer) {
    lists.push_back(at::empty(
        {group.count, ceil_div(group.num_queries, options.selection_stride), inputs.key.size(1), width},
        query.options().dtype(at::kInt)));
  }
  write_index_lists(kernels.select, op, options, query, key, lists);
  return lists;
}

// Rows of a packed tensor as the kernels copy them: whole, wherever the next row begins.
Tensor whole_rows(const Tensor& x) {
  const bool whole = (x.size(2) == 1 || x.stride(2) == 1) && (x.size(1) == 1 || x.stride(1) == x.size(2));
  return whole ? x : x.contiguous();
}

PackedInputs with_whole_rows(const PackedInputs& inputs) {
  PackedInputs whole = {whole_rows(inputs.query), whole_rows(inputs.key), whole_rows(inputs.value)};
  if (inputs.index_query.defined()) {
    whole.index_query = whole_rows(inputs.index_query);
    whole.index_key = whole_rows(inputs.index_key);
  }
  return whole;
}

}  // namespace

VarlenState varlen_forward(const VarlenKernels* kernels, const char* op, const PackedInputs& inputs,
                           const Documents& documents, const TreeOptions& options,
                           std::string_view grouping) {
  check_varlen(op, inputs, documents, options, grouping);
  const VarlenState state = new_results(inputs.query, inputs.value);
  if (kernels == nullptr) return state;
  const auto& [out, gmax, gsum] = state;
  const VarlenPlan plan = plan_varlen(*kernels, op, inputs, documents, options, grouping);
  const PackedInputs whole = with_whole_rows(inputs);
  using Rows = GroupRows;
  for (const VarlenGroup& group : plan.groups) {
    GroupRows batch(*kernels, plan, group);
    const std::vector<Tensor> lists = group_lists(*kernels, op, whole, options, group, batch);
    const Tensor batch_q = batch.take(whole.query, Rows::kQueries);
    const Tensor batch_k = batch.take(whole.key, Rows::kKeys), batch_v = batch.take(whole.value, Rows::kKeys);
    const Tensor batch_out = batch.place(out, Rows::kQueries), batch_max = batch.place(gmax, Rows::kQueries),
                 batch_sum = batch.place(gsum, Rows::kQueries);
    batch.gather();
    AttentionForward* const forward = lists.empty() ? kernels->forward : kernels->over_lists;
    forward_by_depth(forward, options, group_args(op, options, batch_k, group, lists), batch_q, batch_k,
                     batch_v, batch_out, batch_max, batch_sum, lists);
    batch.scatter();
  }
  if (plan.fills) {
    kernels->fill(plan.starts_q, plan.kinds, 0, out);
    kernels->fill(plan.starts_q, plan.kinds, -std::numeric_limits<double>::infinity(), gmax);
    kernels->fill(plan.starts_q, plan.kinds, 0, gsum);
  }
  return state;
}

Gradients varlen_backward(const VarlenKernels* kernels, const OptionalTensor& dout,
                          const OptionalTensor& dlse, const PackedInputs& inputs, const Documents& documents,
                          const VarlenState& state, const TreeOptions& options, std::string_view grouping,
                          std::array<bool, 3> output_mask) {
  constexpr const char* kOp = "attention_varlen_backward";
  check_varlen(kOp, inputs, documents, options, grouping);
  const Tensor &query = inputs.query, &key = inputs.key, &value = inputs.value;
  const auto& [out, gmax, gsum] = state;
  check_results(kOp, "query", dout, dlse, query, value, out, gmax, gsum);
  const Gradients gradients = new_gradients(query, key, value, output_mask);
  const auto& [dq, dk, dv] = gradients;
  if (kernels == nullptr || !(output_mask[0] || output_mask[1] || output_mask[2])) return gradients;
  const VarlenPlan plan = plan_varlen(*kernels, kOp, inputs, documents, options, grouping);
  const PackedInputs whole = with_whole_rows(inputs);
  const Tensor upstream = whole_rows(given_or_zeros(dout, out)), result = whole_rows(out),
               max = gmax.contiguous(), sum = gsum.contiguous(),
               of_lse = dlse.has_value() ? dlse->contiguous() : Tensor();
  using Rows = GroupRows;
  for (const VarlenGroup& group : plan.groups) {
    GroupRows batch(*kernels, plan, group);
    const std::vector<Tensor> lists = group_lists(*kernels, kOp, whole, options, group, batch);
    const Tensor batch_q = batch.take(whole.query, Rows::kQueries),
                 batch_k = batch.take(whole.key, Rows::kKeys), batch_v = batch.take(whole.value, Rows::kKeys);
    const Tensor batch_dq = batch.place(dq, Rows::kQueries), batch_dk = batch.place(dk, Rows::kKeys),
                 batch_dv = batch.place(dv, Rows::kKeys);
    // A padded query has the scores 0, so with maximum 0 and sum 1 all of its weights are finite, and without
    // an upstream gradient it adds 0.
    const Tensor batch_dout = batch.take(upstream, Rows::kQueries),
                 batch_out = batch.take(result, Rows::kQueries), batch_max = batch.take(max, Rows::kQueries),
                 batch_sum = batch.take(sum, Rows::kQueries, /*padding=*/1),
                 batch_dlse = dlse.has_value() ? batch.take(of_lse, Rows::kQueries) : Tensor();
    batch.gather();
    backward_by_depth(kernels->backward, options, group_args(kOp, options, batch_k, group, lists), batch_dout,
                      batch_dlse, batch_q, batch_k, batch_v, batch_out, batch_max, batch_sum, lists, batch_dq,
                      batch_dk, batch_dv);
    batch.scatter();
  }
  if (plan.fills) {
    if (dq.defined()) kernels->fill(plan.starts_q, plan.kinds, 0, dq);
    if (dk.defined()) kernels->fill(plan.starts_k, plan.kinds, 0, dk);
    if (dv.defined()) kernels->fill(plan.starts_k, plan.kinds, 0, dv);
  }
  return gradients;
}

}  // namespace htree::tree_attention
