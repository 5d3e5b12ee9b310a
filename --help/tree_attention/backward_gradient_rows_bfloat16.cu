// Written by setup.py from csrc/instances.py.
#include "ops/tree_attention/cuda/backward/gradient_rows.cuh"

namespace htree::tree_attention {
template cudaError_t launch_gradient_rows<__nv_bfloat16, 32>(const RowParams&, cudaStream_t);
template cudaError_t launch_key_bounds<__nv_bfloat16, 32>(const PackParams&, const LayerBounds&, cudaStream_t);
template cudaError_t launch_gradient_rows<__nv_bfloat16, 64>(const RowParams&, cudaStream_t);
template cudaError_t launch_key_bounds<__nv_bfloat16, 64>(const PackParams&, const LayerBounds&, cudaStream_t);
template cudaError_t launch_gradient_rows<__nv_bfloat16, 128>(const RowParams&, cudaStream_t);
template cudaError_t launch_key_bounds<__nv_bfloat16, 128>(const PackParams&, const LayerBounds&, cudaStream_t);
}  // namespace htree::tree_attention
