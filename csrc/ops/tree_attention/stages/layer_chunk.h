// Calls the staged launchers on one chunk of one layer and owns their scratch, for the ops that are several
// stages in one.
#pragma once

#include <ATen/ops/searchsorted.h>

#include <limits>

#include "device/work.cuh"
#include "ops/selection/cuda/any/compute_scores.h"
#include "ops/selection/cuda/any/select_topk.h"
#include "ops/sparse_attention/cuda/any/accumulate.h"
#include "ops/tree/cuda/any/cuda_tensors.h"
#include "ops/tree_attention/kernels.h"
#include "ops/tree_attention/plan/stage_chunks.h"

namespace htree::tree_attention {

// A view that starts at another batch, row and head.
template <typename T>
View<T> shifted(View<T> view, int64_t batch, int64_t row, int64_t head) {
  view.data += batch * view.batch + row * view.row + head * view.head;
  return view;
}

// What all chunks of a call share.
struct LayerCall {
  const Tensor& q;        // [B, T_q, H, K]
  const Tensor& layer_k;  // [B, N, H_kv, K]
  const Tensor& span_k;   // [B, ceil(T / selection_span), H_kv, K], undefined without a selection_span
  const Tensor& parents;  // [B, ceil(T_q/s), S, list_width]
  const Tensor& cos;
  const Tensor& sin;
  const LayerArgs& args;
  Geometry whole;  // of the whole call
  cudaStream_t stream;
  bool scores_nodes = true;  // false: the call only selects, and does so by span means
};

// The scores and candidate counts of one chunk (`box_`, a box of rows) in device scratch, and the steps that
// write and read them. With a selection_span the leaders have scores of their own, the log-sums of their
// candidates' means, and select() reads these.
template <typename T>
class LayerChunk {
 public:
  // Allocates scratch for the largest chunk of `plan`. Chunks run one after another on the
  // stream and share it.
  LayerChunk(const LayerCall& call, const ChunkPlan& plan) : call_(call) {
    const int64_t rows = plan.batches * plan.queries * plan.lists;
    const auto options = call.q.options();
    const int64_t row_scores = call.whole.capacity() * call.whole.group;
    const int64_t leaders = plan.batches * ceil_div(plan.queries, call.whole.queries_per_list) * plan.lists;
    positions_ = at::empty({leaders * call.args.top_k}, options.dtype(at::kInt));
    if (call.scores_nodes) {
      scores_ = at::empty({rows * row_scores}, options.dtype(at::kFloat));
      num_candidates_ = at::empty({rows}, options.dtype(at::kInt));
    }
    if (call.span_k.defined()) {
      span_scores_ = at::empty({leaders * row_scores}, options.dtype(at::kFloat));
      span_candidates_ = at::empty({leaders}, options.dtype(at::kInt));
    }
  }

  // Moves to another chunk. first_query is a multiple of queries_per_list.
  void move_to(int64_t batch, int64_t num_batches, int64_t query, int64_t num_queries, int64_t list,
               int64_t num_lists) {
    batch_ = batch;
    query_ = query;
    list_ = list;
    box_ = call_.whole;
    box_.num_batches = num_batches;
    box_.num_queries = num_queries;
    box_.num_lists = num_lists;
    box_.first_list = list;
    box_.t0 += query * box_.query_step;
    parents_ = shifted(input_view<int32_t>(call_.parents), batch, query / box_.queries_per_list, list);
  }

  void compute_scores() {
    C10_CUDA_CHECK(launch_compute_scores<FullWork>(
        scores_params(box_, call_.layer_k, scores_, num_candidates_), call_.stream));
  }

  // Writes the positions that the leaders select, ascending.
  void select_ascending() {
    if (call_.span_k.defined()) {
      compute_span_scores();
    }
    select(SelectionOrder::kAscending);
  }

  // Selects the positions for the leaders.
  void select(SelectionOrder order) {
    const bool by_span = call_.span_k.defined();
    SelectParams params;
    params.scores = input<float>(by_span ? span_scores_ : scores_);
    params.num_candidates = input<int32_t>(by_span ? span_candidates_ : num_candidates_);
    params.positions = output<int32_t>(positions_);
    params.num_batches = box_.num_batches;
    params.num_queries = num_leaders();
    params.score_queries = by_span ? params.num_queries : box_.num_queries;
    params.query_step = by_span ? 1 : box_.queries_per_list;
    params.num_lists = box_.num_lists;
    params.capacity = box_.capacity();
    params.group = box_.group;
    params.top_k = call_.args.top_k;
    params.selection = call_.args.selection;
    params.order = order;
    const Tensor scratch = device_scratch(select_scratch_bytes(params), positions_);
    params.scratch = scratch_pointer(scratch);
    C10_CUDA_CHECK(launch_select_topk<FullWork>(params, call_.stream));
  }

  // Writes to next_parents [B, ceil(T_q/s), S, top_k] of the whole call.
  void store_next_parents(const Tensor& next_parents) {
    NextParentsParams params;
    params.parents = parents_;
    params.positions = positions_view();
    params.next_parents =
        shifted(output_view<int32_t>(next_parents), batch_, query_ / box_.queries_per_list, list_);
    params.num_batches = box_.num_batches;
    params.num_queries = num_leaders();
    params.num_lists = box_.num_lists;
    params.list_width = box_.list_width;
    params.rate = box_.rate;
    params.top_k = call_.args.top_k;
    const Tensor scratch = device_scratch(next_parents_scratch_bytes(params), positions_);
    params.scratch = scratch_pointer(scratch);
    C10_CUDA_CHECK(launch_compute_next_parents<FullWork>(params, call_.stream));
  }

  // Takes the entries of next_parents [B, ceil(T_q/s), S, top_k] of the whole call for selected: writes their positions.
  void find(const Tensor& next_parents) {
    const auto rows = [&](const Tensor& lists) {
      return lists.narrow(0, batch_, box_.num_batches)
          .narrow(1, query_ / box_.queries_per_list, num_leaders())
          .narrow(2, list_, box_.num_lists);
    };
    const Tensor next = rows(next_parents), lists = rows(call_.parents);
    const Tensor behind = lists.masked_fill(lists.lt(0), std::numeric_limits<int32_t>::max());
    const Tensor slots = at::searchsorted(behind, next.floor_divide(box_.rate), /*out_int32=*/true);
    positions_.narrow(0, 0, next.numel())
        .view(next.sizes())
        .copy_(slots.mul_(box_.rate).add_(next.remainder(box_.rate)).masked_fill_(next.lt(0), -1));
  }

  // Sets the scores of the selected positions to -inf, for every query of a stride.
  void mask() {
    const int64_t capacity = box_.capacity();
    MaskParams params;
    params.scores = output<float>(scores_);
    params.score_strides[4] = 1;
    params.score_strides[3] = box_.group;
    params.score_strides[2] = capacity * box_.group;
    params.score_strides[1] = box_.num_lists * params.score_strides[2];
    params.score_strides[0] = box_.num_queries * params.score_strides[1];
    params.positions = positions_view();
    params.num_batches = box_.num_batches;
    params.num_queries = box_.num_queries;
    params.queries_per_list = box_.queries_per_list;
    params.num_lists = box_.num_lists;
    params.capacity = capacity;
    params.group = box_.group;
    params.top_k = call_.args.top_k;
    C10_CUDA_CHECK(launch_mask_topk_scores(params, call_.stream));
  }

  // Writes the state of the candidates whose score is not -inf to lmax, lsum [B, T_q, H] and lout [B, T_q, H,
  // V] of the whole call.
  void accumulate(const Tensor& layer_v, const Tensor& lmax, const Tensor& lsum, const Tensor& lout) {
    AccumulateParams<T> params;
    params.geometry = box_;
    params.values = shifted(input_view<T>(layer_v), batch_, 0, 0);
    params.parents = parents_;
    params.scores = input<float>(scores_);
    params.num_candidates = input<int32_t>(num_candidates_);
    params.value_dim = lout.size(3);
    const int64_t first = (batch_ * lmax.size(1) + query_) * lmax.size(2) + list_ * box_.group;
    params.state = {output<float>(lmax) + first, output<float>(lsum) + first,
                    output<float>(lout) + first * params.value_dim, lmax.size(1) * lmax.size(2),
                    lmax.size(2)};
    C10_CUDA_CHECK(launch_accumulate(params, call_.stream));
  }

  // Writes nodes and scores of the selected positions, [B, T_q, S, top_k] each, for lists that belong
  // to one query head.
  void store_picked(const Tensor& topk_indices, const Tensor& topk_scores) {
    PickParams params;
    params.parents = parents_;
    params.scores = input<float>(scores_);
    params.positions = input<int32_t>(positions_);
    params.nodes = shifted(output_view<int32_t>(topk_indices), batch_, query_, list_);
    params.node_scores = shifted(output_view<float>(topk_scores), batch_, query_, list_);
    params.num_batches = box_.num_batches;
    params.num_queries = box_.num_queries;
    params.num_lists = box_.num_lists;
    params.capacity = box_.capacity();
    params.rate = box_.rate;
    params.top_k = call_.args.top_k;
    C10_CUDA_CHECK(launch_pick_topk(params, call_.stream));
  }

 private:
  int64_t num_leaders() const { return ceil_div(box_.num_queries, box_.queries_per_list); }

  // The parameters for scoring `rows` against whole layers of keys or of span means.
  ScoresParams<T> scores_params(const Geometry& rows, const Tensor& keys, const Tensor& scores,
                                const Tensor& num_candidates) const {
    ScoresParams<T> params;
    params.geometry = rows;
    params.q = input_view<T>(call_.q);
    params.q = shifted(params.q, batch_, query_ * box_.query_step, list_ * box_.group);
    params.q.row *= rows.query_step;
    params.keys = shifted(input_view<T>(keys), batch_, 0, 0);
    params.parents = parents_;
    params.table = rotary_table<float>(call_.cos, call_.sin);
    params.scores = output<float>(scores);
    params.num_candidates = output<int32_t>(num_candidates);
    params.key_dim = call_.q.size(3);
    params.scale = static_cast<float>(call_.args.scale);
    params.fill_tail = false;
    return params;
  }

  void compute_span_scores() {
    Geometry leaders = box_;
    leaders.num_queries = num_leaders();
    leaders.query_step = box_.query_step * box_.queries_per_list;
    leaders.queries_per_list = 1;
    ComputeSpanScoresParams<T> params;
    params.row = scores_params(leaders, call_.span_k, span_scores_, span_candidates_);
    params.means_per_node = box_.node_span / call_.args.selection_span;
    params.num_means = call_.span_k.size(1);
    params.top_k = call_.args.top_k;
    C10_CUDA_CHECK(launch_compute_span_scores(params, call_.stream));
  }

  View<const int32_t> positions_view() const {
    const int64_t list = call_.args.top_k;
    const int64_t query = box_.num_lists * list;
    return {input<int32_t>(positions_), num_leaders() * query, query, list};
  }

  const LayerCall& call_;
  Tensor scores_;
  Tensor num_candidates_;
  Tensor span_scores_;      // of the leaders
  Tensor span_candidates_;  // of the leaders
  Tensor positions_;
  Geometry box_;
  int64_t batch_ = 0;
  int64_t query_ = 0;
  int64_t list_ = 0;
  View<const int32_t> parents_;
};

// Runs steps(LayerChunk<T>&) on every chunk of the call.
template <typename T, typename Steps>
void run_in_chunks(const LayerCall& call, Steps&& steps) {
  const Geometry& whole = call.whole;
  const int64_t score_bytes = whole.capacity() * whole.group * static_cast<int64_t>(sizeof(float));
  const int64_t span_bytes = call.span_k.defined() ? ceil_div(score_bytes, whole.queries_per_list) : 0;
  const int64_t row_bytes = (call.scores_nodes ? score_bytes : 0) + span_bytes;
  const ChunkPlan plan = plan_chunks(whole.num_batches, whole.num_queries, whole.num_lists,
                                     whole.queries_per_list, row_bytes, kScoreScratchBytes);
  LayerChunk<T> chunk(call, plan);
  for_each_chunk(plan, whole.num_batches, whole.num_queries, whole.num_lists,
                 [&](int64_t batch, int64_t num_batches, int64_t query, int64_t num_queries, int64_t list,
                     int64_t num_lists) {
                   chunk.move_to(batch, num_batches, query, num_queries, list, num_lists);
                   steps(chunk);
                 });
}

}  // namespace htree::tree_attention
