// Written by setup.py from csrc/instances.py.
#include "ops/tree_attention/cuda/backward/dense_rows/rows.cuh"

namespace htree::tree_attention {
template cudaError_t launch_row_tiles<__half, 32>(const DenseGradientParams&, cudaStream_t);
template cudaError_t launch_row_tiles<__half, 64>(const DenseGradientParams&, cudaStream_t);
template cudaError_t launch_row_tiles<__half, 128>(const DenseGradientParams&, cudaStream_t);
template cudaError_t launch_row_tiles<__nv_bfloat16, 32>(const DenseGradientParams&, cudaStream_t);
template cudaError_t launch_row_tiles<__nv_bfloat16, 64>(const DenseGradientParams&, cudaStream_t);
template cudaError_t launch_row_tiles<__nv_bfloat16, 128>(const DenseGradientParams&, cudaStream_t);
}  // namespace htree::tree_attention
