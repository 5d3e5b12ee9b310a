// Written by setup.py from csrc/instances.py.
#include "ops/tree_attention/cuda/backward/per_parent/key_gradient.cuh"

namespace htree::tree_attention {
template cudaError_t launch_key_gradient<__nv_bfloat16, 128>(const KeyGradientParams&, cudaStream_t);
}  // namespace htree::tree_attention
