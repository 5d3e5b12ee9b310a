// Written by setup.py from csrc/instances.py.
#include "ops/tree_attention/cuda/backward/per_list/gradient.cuh"

namespace htree::tree_attention {
template cudaError_t launch_per_list_gradient<__half, 128>(const PerListGradientParams&, cudaStream_t);
}  // namespace htree::tree_attention
