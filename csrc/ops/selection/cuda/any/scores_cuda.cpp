// CUDA entry point of the scores stage.
#include "device/work.cuh"
#include "ops/selection/cuda/any/compute_scores.h"
#include "ops/selection/selection_kernels.h"
#include "ops/tree/cuda/any/cuda_tensors.h"

namespace htree::tree_attention {
namespace {

template <typename Work>
void launch_scores(const char* op, const Tensor& q, const Tensor& layer_k, const Tensor& parents,
                   const Tensor& cos, const Tensor& sin, const LayerArgs& args, const Tensor& scores,
                   const Tensor& num_candidates) {
  const LaunchScope scope(q);
  dispatch_device_dtype(op, q.scalar_type(), FloatTypes{}, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const int64_t num_lists = layer_k.size(2);
    ScoresParams<T> params;
    params.geometry = geometry_of(args, q.size(0), q.size(1), num_lists, q.size(2) / num_lists,
                                  /*lists_per_kv_head=*/1, layer_k.size(1));
    params.q = input_view<T>(q);
    params.keys = input_view<T>(layer_k);
    params.parents = input_view<int32_t>(parents);
    params.table = rotary_table<float>(cos, sin);
    params.scores = output<float>(scores);
    params.num_candidates = output<int32_t>(num_candidates);
    params.key_dim = q.size(3);
    params.scale = static_cast<float>(args.scale);
    C10_CUDA_CHECK(launch_compute_scores<Work>(params, scope.stream()));
  });
}

}  // namespace

void compute_scores_cuda(const Tensor& q, const Tensor& layer_k, const Tensor& parents, const Tensor& cos,
                         const Tensor& sin, const LayerArgs& args, const Tensor& scores,
                         const Tensor& num_candidates) {
  launch_scores<FullWork>("compute_scores", q, layer_k, parents, cos, sin, args, scores, num_candidates);
}

void io_compute_scores_cuda(const Tensor& q, const Tensor& layer_k, const Tensor& parents, const Tensor& cos,
                            const Tensor& sin, const LayerArgs& args, const Tensor& scores,
                            const Tensor& num_candidates) {
  launch_scores<IoOnly>("io_compute_scores", q, layer_k, parents, cos, sin, args, scores, num_candidates);
}

}  // namespace htree::tree_attention
