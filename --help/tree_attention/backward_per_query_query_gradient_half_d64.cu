// Written by setup.py from csrc/instances.py.
#include "ops/tree_attention/cuda/backward/per_query/query_gradient.cuh"

namespace htree::tree_attention {
template cudaError_t launch_query_gradient<__half, 64>(const QueryGradientParams&, cudaStream_t);
}  // namespace htree::tree_attention
