// CUDA entry points of the merge stage.
#include "device/work.cuh"
#include "ops/selection/cuda/any/select_topk.h"
#include "ops/sparse_attention/cuda/any/merge_params.h"
#include "ops/sparse_attention/sparse_attention_kernels.h"
#include "ops/tree/cuda/any/cuda_tensors.h"

namespace htree::tree_attention {

void merge_to_global_cuda(const Tensor& gmax, const Tensor& gsum, const Tensor& gout, const Tensor& lmax,
                          const Tensor& lsum, const Tensor& lout) {
  const LaunchScope scope(gout);
  MergeParams params;
  params.global = {output<float>(gmax), output<float>(gsum), output<float>(gout)};
  std::copy_n(gmax.strides().begin(), 3, params.global.max_strides);
  std::copy_n(gsum.strides().begin(), 3, params.global.sum_strides);
  std::copy_n(gout.strides().begin(), 4, params.global.out_strides);
  params.layer = {input<float>(lmax), input<float>(lsum), input<float>(lout)};
  std::copy_n(lmax.strides().begin(), 3, params.layer.max_strides);
  std::copy_n(lsum.strides().begin(), 3, params.layer.sum_strides);
  std::copy_n(lout.strides().begin(), 4, params.layer.out_strides);
  params.num_batches = gout.size(0);
  params.num_rows = gout.size(1);
  params.num_heads = gout.size(2);
  params.value_dim = gout.size(3);
  C10_CUDA_CHECK(launch_merge_to_global(params, scope.stream()));
}

void final_normalize_cuda(const Tensor& gout, const Tensor& gsum, const Tensor& out) {
  const LaunchScope scope(gout);
  dispatch_device_dtype("final_normalize", out.scalar_type(), FloatTypes{}, [&](auto tag) {
    using T = typename decltype(tag)::type;
    NormalizeParams<T> params;
    params.state.sum = input<float>(gsum);
    params.state.out = input<float>(gout);
    std::copy_n(gsum.strides().begin(), 3, params.state.sum_strides);
    std::copy_n(gout.strides().begin(), 4, params.state.out_strides);
    params.out = output<T>(out);
    params.num_batches = gout.size(0);
    params.num_rows = gout.size(1);
    params.num_heads = gout.size(2);
    params.value_dim = gout.size(3);
    C10_CUDA_CHECK(launch_final_normalize(params, scope.stream()));
  });
}

void subtract_topk_cuda(const Tensor& layer_v, const Tensor& topk_indices, const Tensor& topk_scores,
                        const Tensor& lmax, const Tensor& lsum, const Tensor& lout,
                        const Tensor& selected_indices) {
  const LaunchScope scope(lout);
  dispatch_device_dtype("subtract_topk", layer_v.scalar_type(), FloatTypes{}, [&](auto tag) {
    using T = typename decltype(tag)::type;
    SubtractParams<T> params;
    params.values = input_view<T>(layer_v);
    params.indices = input_view<int32_t>(topk_indices);
    params.scores = input_view<float>(topk_scores);
    params.max = output<float>(lmax);
    params.sum = output<float>(lsum);
    params.out = output<float>(lout);
    params.num_batches = lout.size(0);
    params.num_rows = lout.size(1);
    params.num_heads = lout.size(2);
    params.heads_per_kv_head = lout.size(2) / layer_v.size(2);
    params.num_nodes = layer_v.size(1);
    params.value_dim = lout.size(3);
    params.top_k = topk_indices.size(3);
    C10_CUDA_CHECK(launch_subtract_topk(params, scope.stream()));
  });

  NextParentsParams sorting;  // no parents: the entries are node ids already
  sorting.positions = input_view<int32_t>(topk_indices);
  sorting.next_parents = output_view<int32_t>(selected_indices);
  sorting.num_batches = selected_indices.size(0);
  sorting.num_queries = selected_indices.size(1);
  sorting.num_lists = selected_indices.size(2);
  sorting.top_k = selected_indices.size(3);
  const Tensor scratch = device_scratch(next_parents_scratch_bytes(sorting), selected_indices);
  sorting.scratch = scratch_pointer(scratch);
  C10_CUDA_CHECK(launch_compute_next_parents<FullWork>(sorting, scope.stream()));
}

}  // namespace htree::tree_attention
