// Written by setup.py from csrc/instances.py.
#include "ops/tree_attention/stages/rope/rope.cuh"

namespace htree::tree_attention {
template cudaError_t launch_rope(const RopeParams<float, float>&, cudaStream_t);
template cudaError_t launch_rope(const RopeParams<__half, float>&, cudaStream_t);
template cudaError_t launch_rope(const RopeParams<__nv_bfloat16, float>&, cudaStream_t);
template cudaError_t launch_rope(const RopeParams<double, double>&, cudaStream_t);
}  // namespace htree::tree_attention
