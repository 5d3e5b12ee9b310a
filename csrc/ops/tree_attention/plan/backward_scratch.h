// Which kernels make the gradients of a layer, and where their scratch lies. No torch.
#pragma once

#include "ops/tree_attention/cuda/backward/per_list/per_list_schedule.h"
#include "ops/tree_attention/cuda/backward_schedule.h"

namespace htree::tree_attention {

// Whether the gradients of a layer are made by backward/per_list/, and there for runs of neighbouring queries.
inline bool layer_per_list(const TreeCall& call, size_t layer_idx) {
  return call.config.gather == GatherKernel::kPerList ||
         (call.config.per_list_top && layer_idx + 1 == call.layers.size());
}
inline bool layer_runs(const TreeCall& call, size_t layer_idx) {
  return call.config.per_list_top && layer_idx + 1 == call.layers.size();
}
// Blocks of kGradientRows rows per list or run.
inline int64_t tasks_of_list(const TreeCall& call, size_t layer_idx) {
  const int64_t queries = layer_runs(call, layer_idx) ? kGradientRun : call.problem.args.selection_stride;
  return ceil_div(queries * call.problem.group(), kGradientRows);
}
// Partial sums of a block in a layer, at most.
inline int64_t partial_slots(const TreeCall& call, size_t layer_idx) {
  const bool implicit = layer_idx + 1 == call.layers.size();
  return implicit ? call.layers[layer_idx].num_parents : call.problem.args.top_k;
}
inline int64_t partial_bytes_of(const TreeCall& call) {
  return partial_sum_bytes(call.problem.key_dim, call.problem.value_dim);
}

// Whether dK and dV are made by parent_gradient.cuh.
inline bool by_parent(const TreeCall& call) {
  const int64_t group = call.problem.group();
  return call.config.gather != GatherKernel::kPerList && group >= kMinParentGroup && group <= kMaxParentGroup;
}

// Offsets of the scratch, in bytes.
struct BackwardScratch {
  int64_t key_bounds, query_bounds, records, meta, query_sums, lists, list_bytes, mask, counts, entries,
      offsets, run_counts, rotations, partials, partial_bytes, scores, total;

  BackwardScratch(const TreeCall& call, bool recompute) {
    const AttentionProblem& p = call.problem;
    const AttentionConfig& c = call.config;
    const int64_t chunk_lists = ceil_div(c.query_chunk, p.args.selection_stride);
    const int64_t rows = c.batch_chunk * c.query_chunk * p.num_heads;
    const int64_t query_rows = c.batch_chunk * c.query_chunk * p.num_kv_heads;
    const int64_t list_rows = c.batch_chunk * chunk_lists * p.num_kv_heads;
    const int64_t num_entries = call.layers.size() > 1 ? list_rows * p.args.top_k : 0;
    total = 0;
    const auto take = [&](int64_t bytes) {
      const int64_t at = total;
      total += aligned(bytes);
      return at;
    };
    key_bounds = take(p.batch * p.num_kv_heads * static_cast<int64_t>(sizeof(KeyBounds)));
    query_bounds = take(c.batch_chunk * p.num_kv_heads * static_cast<int64_t>(sizeof(QueryBounds)));
    const bool per_list = c.gather == GatherKernel::kPerList;
    records = take(layer_per_list(call, 0) ? 0
                   : by_parent(call)       ? query_rows * tiled_record_bytes(p.key_dim, p.value_dim)
                                           : rows * 2 * (p.key_dim + p.value_dim));
    meta = take(rows * static_cast<int64_t>(sizeof(RowMeta)));
    query_sums = take(call.layers.size() > 1 ? rows * p.key_dim * 4 : 0);
    list_bytes = aligned(list_rows * p.args.top_k * 4);
    lists = take(recompute ? list_bytes * static_cast<int64_t>(call.layers.size() - 1) : 0);
    mask = take(call.layers.size() > 1 ? list_rows * call.mask_words() * 4 : 0);
    counts = take(list_rows * 4);
    entries = take(num_entries * 4);
    const int64_t heads = num_entries ? c.batch_chunk * p.num_kv_heads : 0;
    offsets = take(heads * (call.layers[0].num_parents + 1) * 4);
    run_counts = take(heads * ceil_div(chunk_lists, kInverseRows) * call.layers[0].num_parents * 4);
    rotations = take(by_parent(call) ? call.rope_rows() * p.key_dim * 2 : 0);
    partial_bytes = 0;
    for (size_t i = 0; i < call.layers.size(); ++i) {
      if (layer_per_list(call, i)) {
        const int64_t per_list = tasks_of_list(call, i) * partial_slots(call, i) * partial_bytes_of(call);
        const int64_t most = partial_sum_lists(per_list ? kPartialSumBytes : kTopSumBytes, 1, 1, per_list);
        const int64_t runs = (c.query_chunk / kGradientRun + 2) * c.batch_chunk * p.num_kv_heads;
        partial_bytes =
            std::max(partial_bytes, std::min(most, layer_runs(call, i) ? runs : list_rows) * per_list);
      }
    }
    // scores are there while lists are selected, before the first sum
    scores = partials = take(std::max(partial_bytes, recompute ? score_scratch_bytes(call) : 0));
  }
};

// First row of a layer's sums.
inline int64_t layer_rows(const TreeCall& call, size_t layer_idx) {
  int64_t rows = 0;
  for (size_t i = 0; i < layer_idx; ++i) {
    rows += call.problem.batch * call.problem.num_kv_heads * call.layers[i].num_parents * kTensorCoreRate;
  }
  return rows;
}

}  // namespace htree::tree_attention
