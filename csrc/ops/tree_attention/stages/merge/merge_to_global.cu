#include "ops/tree_attention/stages/merge/merge.cuh"

namespace htree::tree_attention {

void launch_merge_to_global(const MergeParams& params, cudaStream_t stream) {
  const int64_t states = params.num_batches * params.num_rows * params.num_heads;
  if (states > 0) {
    merge_to_global_kernel<<<blocks_for(states * device::kWarpSize), kElementThreads, 0, stream>>>(params,
                                                                                                   states);
  }
}

template void launch_final_normalize(const NormalizeParams<float>&, cudaStream_t);
template void launch_final_normalize(const NormalizeParams<__half>&, cudaStream_t);
template void launch_final_normalize(const NormalizeParams<__nv_bfloat16>&, cudaStream_t);
template void launch_subtract_topk(const SubtractParams<float>&, cudaStream_t);
template void launch_subtract_topk(const SubtractParams<__half>&, cudaStream_t);
template void launch_subtract_topk(const SubtractParams<__nv_bfloat16>&, cudaStream_t);

}  // namespace htree::tree_attention
