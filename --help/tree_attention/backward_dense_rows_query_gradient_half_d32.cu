// Written by setup.py from csrc/instances.py.
#include "ops/tree_attention/cuda/backward/dense_rows/query_gradient.cuh"

namespace htree::tree_attention {
template cudaError_t launch_dense_query_gradient<__half, 32>(const DenseGradientParams&, cudaStream_t);
}  // namespace htree::tree_attention
