// Written by setup.py from csrc/instances.py.
#include "ops/tree_attention/cuda/backward/per_parent/parent_gradient.cuh"

namespace htree::tree_attention {
template cudaError_t launch_parent_gradient<__nv_bfloat16, 32>(const KeyGradientParams&, cudaStream_t);
}  // namespace htree::tree_attention
