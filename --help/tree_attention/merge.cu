// Written by setup.py from csrc/instances.py.
#include "ops/tree_attention/stages/merge/merge.cuh"

namespace htree::tree_attention {
template cudaError_t launch_final_normalize(const NormalizeParams<float>&, cudaStream_t);
template cudaError_t launch_final_normalize(const NormalizeParams<__half>&, cudaStream_t);
template cudaError_t launch_final_normalize(const NormalizeParams<__nv_bfloat16>&, cudaStream_t);
template cudaError_t launch_subtract_topk(const SubtractParams<float>&, cudaStream_t);
template cudaError_t launch_subtract_topk(const SubtractParams<__half>&, cudaStream_t);
template cudaError_t launch_subtract_topk(const SubtractParams<__nv_bfloat16>&, cudaStream_t);
}  // namespace htree::tree_attention
