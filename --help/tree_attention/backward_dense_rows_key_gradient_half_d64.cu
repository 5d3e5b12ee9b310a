// Written by setup.py from csrc/instances.py.
#include "ops/tree_attention/cuda/backward/dense_rows/key_gradient.cuh"

namespace htree::tree_attention {
template cudaError_t launch_dense_key_gradient<__half, 64>(const DenseGradientParams&, cudaStream_t);
}  // namespace htree::tree_attention
