// Written by setup.py from csrc/instances.py.
#include "ops/tree_attention/cuda/tree/dense_layer.cuh"

namespace htree::tree_attention {
template cudaError_t launch_dense_layer<__half, 32>(const DenseLayerParams&, cudaStream_t);
template cudaError_t launch_dense_layer<__half, 64>(const DenseLayerParams&, cudaStream_t);
template cudaError_t launch_dense_layer<__half, 128>(const DenseLayerParams&, cudaStream_t);
template cudaError_t launch_dense_layer<__nv_bfloat16, 32>(const DenseLayerParams&, cudaStream_t);
template cudaError_t launch_dense_layer<__nv_bfloat16, 64>(const DenseLayerParams&, cudaStream_t);
template cudaError_t launch_dense_layer<__nv_bfloat16, 128>(const DenseLayerParams&, cudaStream_t);
}  // namespace htree::tree_attention
