// One layer on CUDA for every dtype and shape: the staged launchers, chunk by chunk.
#include "ops/tree_attention/stages/gather/layer_general.h"

#include "ops/tree_attention/stages/gather/layer_chunk.h"

namespace htree::tree_attention {
namespace {

LayerCall shared_lists_call(const Tensor& q, const Tensor& layer_k, const Tensor& parents, const Tensor& cos,
                            const Tensor& sin, const LayerArgs& args, cudaStream_t stream) {
  const int64_t num_lists = layer_k.size(2);
  return {q,
          layer_k,
          parents,
          cos,
          sin,
          args,
          geometry_of(args, q.size(0), q.size(1), num_lists, q.size(2) / num_lists, /*lists_per_kv_head=*/1,
                      layer_k.size(1)),
          stream};
}

}  // namespace

void select_accumulate_general(const Tensor& q, const Tensor& layer_k, const Tensor& layer_v,
                               const Tensor& parents, const Tensor& cos, const Tensor& sin,
                               const LayerArgs& args, const Tensor& lmax, const Tensor& lsum,
                               const Tensor& lout, const Tensor& next_parents) {
  const LaunchScope scope(q);
  if (lmax.numel() == 0) {
    return;
  }
  const LayerCall call = shared_lists_call(q, layer_k, parents, cos, sin, args, scope.stream());
  dispatch_device_dtype("select_accumulate", q.scalar_type(), FloatTypes{}, [&](auto tag) {
    using T = typename decltype(tag)::type;
    run_in_chunks<T>(call, [&](LayerChunk<T>& chunk) {
      chunk.compute_scores();
      chunk.select(SelectionOrder::kAscending);
      chunk.store_next_parents(next_parents);
      chunk.mask();
      chunk.accumulate(layer_v, lmax, lsum, lout);
    });
  });
}

void bottom_accumulate_general(const Tensor& q, const Tensor& layer_k, const Tensor& layer_v,
                               const Tensor& parents, const Tensor& cos, const Tensor& sin,
                               const LayerArgs& args, const Tensor& lmax, const Tensor& lsum,
                               const Tensor& lout) {
  const LaunchScope scope(q);
  if (lmax.numel() == 0) {
    return;
  }
  const LayerCall call = shared_lists_call(q, layer_k, parents, cos, sin, args, scope.stream());
  dispatch_device_dtype("bottom_accumulate", q.scalar_type(), FloatTypes{}, [&](auto tag) {
    using T = typename decltype(tag)::type;
    run_in_chunks<T>(call, [&](LayerChunk<T>& chunk) {
      chunk.compute_scores();
      chunk.accumulate(layer_v, lmax, lsum, lout);
    });
  });
}

// Only the leaders are scored: rows s apart, each with a list of its own.
void recompute_selection_general(const Tensor& q, const Tensor& layer_k, const Tensor& parents,
                                 const Tensor& cos, const Tensor& sin, const LayerArgs& args,
                                 const Tensor& next_parents) {
  const LaunchScope scope(q);
  if (next_parents.numel() == 0) {
    return;
  }
  LayerCall call = shared_lists_call(q, layer_k, parents, cos, sin, args, scope.stream());
  call.whole.num_queries = ceil_div(q.size(1), args.selection_stride);
  call.whole.query_step = args.selection_stride;
  call.whole.queries_per_list = 1;
  dispatch_device_dtype("recompute_selection", q.scalar_type(), FloatTypes{}, [&](auto tag) {
    using T = typename decltype(tag)::type;
    run_in_chunks<T>(call, [&](LayerChunk<T>& chunk) {
      chunk.compute_scores();
      chunk.select(SelectionOrder::kAscending);
      chunk.store_next_parents(next_parents);
    });
  });
}

}  // namespace htree::tree_attention
