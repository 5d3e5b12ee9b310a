// Written by setup.py from csrc/instances.py.
#include "ops/tree_attention/cuda/backward/per_parent/parent_gradient.cuh"

namespace htree::tree_attention {
template cudaError_t launch_parent_gradient<__half, 64>(const KeyGradientParams&, cudaStream_t);
}  // namespace htree::tree_attention
