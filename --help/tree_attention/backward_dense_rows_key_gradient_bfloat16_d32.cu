// Written by setup.py from csrc/instances.py.
#include "ops/tree_attention/cuda/backward/dense_rows/key_gradient.cuh"

namespace htree::tree_attention {
template cudaError_t launch_dense_key_gradient<__nv_bfloat16, 32>(const DenseGradientParams&, cudaStream_t);
}  // namespace htree::tree_attention
