// Written by setup.py from csrc/instances.py.
#include "ops/tree_attention/cuda/backward/shared_gather/query_gradient.cuh"

namespace htree::tree_attention {
template cudaError_t launch_shared_gather_gradient<__half, 128>(const SharedGatherGradientParams&, cudaStream_t);
}  // namespace htree::tree_attention
