// CUDA entry points of the gather stage.
#include "ops/tree_attention/stages/layer_chunk.h"

namespace htree::tree_attention {

void accumulate_non_topk_cuda(const Tensor& layer_v, const Tensor& parents, const Tensor& scores,
                              const Tensor& num_candidates, const LayerArgs& args, const Tensor& lmax,
                              const Tensor& lsum, const Tensor& lout) {
  const LaunchScope scope(layer_v);
  const Tensor dense_scores = scores.contiguous();
  const Tensor dense_counts = num_candidates.contiguous();
  dispatch_device_dtype("accumulate_non_topk", layer_v.scalar_type(), FloatTypes{}, [&](auto tag) {
    using T = typename decltype(tag)::type;
    AccumulateParams<T> params;
    params.geometry = geometry_of(args, scores.size(0), scores.size(1), scores.size(2), scores.size(4),
                                  /*lists_per_kv_head=*/1, layer_v.size(1));
    params.values = input_view<T>(layer_v);
    params.parents = input_view<int32_t>(parents);
    params.scores = input<float>(dense_scores);
    params.num_candidates = input<int32_t>(dense_counts);
    params.state = {output<float>(lmax), output<float>(lsum), output<float>(lout),
                    lmax.size(1) * lmax.size(2), lmax.size(2)};
    params.value_dim = lout.size(3);
    C10_CUDA_CHECK(launch_accumulate(params, scope.stream()));
  });
}

namespace {

// Runs steps(chunk) for every chunk of a layer, see run_in_chunks().
template <typename Steps>
void run_steps(const char* op, const LayerCall& call, Steps&& steps) {
  dispatch_device_dtype(op, call.q.scalar_type(), FloatTypes{},
                        [&](auto tag) { run_in_chunks<typename decltype(tag)::type>(call, steps); });
}

}  // namespace

void compute_and_select_cuda(const Tensor& q, const Tensor& layer_k, const Tensor& layer_v,
                             const Tensor& parents, const Tensor& cos, const Tensor& sin,
                             const LayerArgs& args, const Tensor& lmax, const Tensor& lsum,
                             const Tensor& lout, const Tensor& topk_indices, const Tensor& topk_scores) {
  const LaunchScope scope(q);
  const int64_t num_heads = q.size(2);
  const Tensor no_span;
  const Geometry whole = geometry_of(args, q.size(0), q.size(1), num_heads, /*group=*/1,
                                     num_heads / layer_k.size(2), layer_k.size(1));
  const LayerCall call = {q, layer_k, no_span, parents, cos, sin, args, whole, scope.stream()};
  run_steps("compute_and_select", call, [&](auto& chunk) {
    chunk.compute_scores();
    chunk.accumulate(layer_v, lmax, lsum, lout);
    if (topk_indices.size(3) > 0) {
      chunk.select(SelectionOrder::kByKey);
      chunk.store_picked(topk_indices, topk_scores);
    }
  });
}

// ---- One layer for every dtype and shape: the staged launchers over bounded chunks of queries,
// docs/semantics/tree_attention.md §1.8. Where `cos` and `sin` are undefined, nothing is rotated.

namespace {

LayerCall shared_lists_call(const Tensor& q, const Tensor& layer_k, const Tensor& span_k,
                            const Tensor& parents, const Tensor& cos, const Tensor& sin,
                            const LayerArgs& args, cudaStream_t stream) {
  const int64_t num_lists = layer_k.size(2);
  const Geometry whole = geometry_of(args, q.size(0), q.size(1), num_lists, q.size(2) / num_lists,
                                     /*lists_per_kv_head=*/1, layer_k.size(1));
  return {q, layer_k, span_k, parents, cos, sin, args, whole, stream};
}

}  // namespace

void select_accumulate_cuda(const Tensor& q, const Tensor& layer_k, const Tensor& layer_v,
                            const Tensor& span_k, const Tensor& parents, const Tensor& cos, const Tensor& sin,
                            const LayerArgs& args, const Tensor& lmax, const Tensor& lsum, const Tensor& lout,
                            const Tensor& next_parents) {
  const LaunchScope scope(q);
  const LayerCall call = shared_lists_call(q, layer_k, span_k, parents, cos, sin, args, scope.stream());
  run_steps("select_accumulate", call, [&](auto& chunk) {
    chunk.compute_scores();
    chunk.select_ascending();
    chunk.store_next_parents(next_parents);
    chunk.mask();
    chunk.accumulate(layer_v, lmax, lsum, lout);
  });
}

void accumulate_given_cuda(const Tensor& q, const Tensor& layer_k, const Tensor& layer_v,
                           const Tensor& span_k, const Tensor& parents, const Tensor& cos, const Tensor& sin,
                           const LayerArgs& args, const Tensor& lmax, const Tensor& lsum, const Tensor& lout,
                           const Tensor& next_parents) {
  const LaunchScope scope(q);
  const LayerCall call = shared_lists_call(q, layer_k, span_k, parents, cos, sin, args, scope.stream());
  run_steps("accumulate_given", call, [&](auto& chunk) {
    chunk.compute_scores();
    chunk.find(next_parents);
    chunk.mask();
    chunk.accumulate(layer_v, lmax, lsum, lout);
  });
}

void bottom_accumulate_cuda(const Tensor& q, const Tensor& layer_k, const Tensor& layer_v,
                            const Tensor& parents, const Tensor& cos, const Tensor& sin,
                            const LayerArgs& args, const Tensor& lmax, const Tensor& lsum,
                            const Tensor& lout) {
  const LaunchScope scope(q);
  const Tensor no_span;
  const LayerCall call = shared_lists_call(q, layer_k, no_span, parents, cos, sin, args, scope.stream());
  run_steps("bottom_accumulate", call, [&](auto& chunk) {
    chunk.compute_scores();
    chunk.accumulate(layer_v, lmax, lsum, lout);
  });
}

// Scores the leaders alone: rows s apart, each with a list of its own.
void recompute_selection_cuda(const Tensor& q, const Tensor& layer_k, const Tensor& span_k,
                              const Tensor& parents, const Tensor& cos, const Tensor& sin,
                              const LayerArgs& args, const Tensor& next_parents) {
  const LaunchScope scope(q);
  LayerCall call = shared_lists_call(q, layer_k, span_k, parents, cos, sin, args, scope.stream());
  call.scores_nodes = !span_k.defined();
  call.whole.num_queries = ceil_div(q.size(1), args.selection_stride);
  call.whole.query_step = args.selection_stride;
  call.whole.queries_per_list = 1;
  run_steps("recompute_selection", call, [&](auto& chunk) {
    if (call.scores_nodes) {
      chunk.compute_scores();
    }
    chunk.select_ascending();
    chunk.store_next_parents(next_parents);
  });
}

}  // namespace htree::tree_attention
