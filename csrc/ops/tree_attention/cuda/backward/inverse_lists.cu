// Launchers of the masks and the inverse of parent lists. No torch.
#include "ops/tree_attention/cuda/backward/inverse_lists.cuh"

#include "ops/tree_attention/attention/shared_bytes.h"

namespace htree::tree_attention {

void launch_list_masks(const ListMaskParams& params, cudaStream_t stream) {
  const int64_t rows = int64_t{params.num_batches} * params.num_lists * params.num_kv_heads;
  const int64_t bytes = kMaskWarps * params.mask_words * 4;
  allow_shared_bytes(list_masks_kernel, bytes);
  list_masks_kernel<<<static_cast<unsigned>(ceil_div(rows, kMaskWarps)), kMaskWarps * 32, bytes, stream>>>(
      params);
}

cudaError_t launch_inverse_lists(const InverseParams& params, cudaStream_t stream) {
  const unsigned heads = static_cast<unsigned>(params.num_batches * params.num_kv_heads);
  const dim3 runs(static_cast<unsigned>(ceil_div(params.num_lists, kInverseRows)), heads);
  const bool shared = params.num_parents <= kSharedCounters;
  const int64_t bytes = shared ? params.num_parents * 4 : 0;
  const auto count = shared ? inverse_count_kernel<true> : inverse_count_kernel<false>;
  const auto fill = shared ? inverse_fill_kernel<true> : inverse_fill_kernel<false>;
  allow_shared_bytes(count, bytes);
  allow_shared_bytes(fill, bytes);
  count<<<runs, kInverseThreads, bytes, stream>>>(params);
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) {
    return error;
  }
  const dim3 parents(static_cast<unsigned>(ceil_div(params.num_parents, kInverseThreads)), heads);
  inverse_places_kernel<<<parents, kInverseThreads, 0, stream>>>(params, static_cast<int>(runs.x));
  inverse_scan_kernel<<<heads, kInverseThreads, 0, stream>>>(params);
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) {
    return error;
  }
  fill<<<runs, kInverseThreads, bytes, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace htree::tree_attention
