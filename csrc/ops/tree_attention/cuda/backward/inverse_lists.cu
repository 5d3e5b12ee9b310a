// Launchers of the masks and the inverse of parent lists. No torch.
#include "ops/tree_attention/cuda/backward/inverse_lists.cuh"

#include "host/cuda/kernel_launch.h"

namespace htree::tree_attention {

cudaError_t launch_list_masks(const ListMaskParams& params, cudaStream_t stream) {
  const int64_t rows = int64_t{params.num_batches} * params.num_lists * params.num_kv_heads;
  const int64_t bytes = kMaskWarps * params.mask_words * 4;
  const LaunchShape shape{.grid = static_cast<unsigned>(ceil_div(rows, kMaskWarps)),
                          .threads = kMaskWarps * 32,
                          .shared_bytes = bytes};
  return launch_kernel(list_masks_kernel, shape, stream, params);
}

cudaError_t launch_inverse_lists(const InverseParams& params, cudaStream_t stream) {
  const unsigned heads = static_cast<unsigned>(params.num_batches * params.num_kv_heads);
  const dim3 runs(static_cast<unsigned>(ceil_div(params.num_lists, kInverseRows)), heads);
  const bool shared = params.num_parents <= kSharedCounters;
  const int64_t bytes = shared ? params.num_parents * 4 : 0;
  const auto count = shared ? inverse_count_kernel<true> : inverse_count_kernel<false>;
  const auto fill = shared ? inverse_fill_kernel<true> : inverse_fill_kernel<false>;
  const LaunchShape per_run{.grid = runs, .threads = kInverseThreads, .shared_bytes = bytes};
  const dim3 parents(static_cast<unsigned>(ceil_div(params.num_parents, kInverseThreads)), heads);
  cudaError_t error = launch_kernel(count, per_run, stream, params);
  if (error == cudaSuccess) {
    error = launch_kernel(inverse_places_kernel, {.grid = parents, .threads = kInverseThreads}, stream,
                          params, static_cast<int>(runs.x));
  }
  if (error == cudaSuccess) {
    error = launch_kernel(inverse_scan_kernel, {.grid = heads, .threads = kInverseThreads}, stream, params);
  }
  return error == cudaSuccess ? launch_kernel(fill, per_run, stream, params) : error;
}

}  // namespace htree::tree_attention
