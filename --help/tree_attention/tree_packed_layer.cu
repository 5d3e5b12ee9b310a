// Written by setup.py from csrc/instances.py.
#include "ops/tree_attention/cuda/tree/packed_layer.cuh"

namespace htree::tree_attention {
template cudaError_t launch_pack_layer<__half, 32>(const PackParams&, cudaStream_t);
template cudaError_t launch_pack_layer<__half, 64>(const PackParams&, cudaStream_t);
template cudaError_t launch_pack_layer<__half, 128>(const PackParams&, cudaStream_t);
template cudaError_t launch_pack_layer<__nv_bfloat16, 32>(const PackParams&, cudaStream_t);
template cudaError_t launch_pack_layer<__nv_bfloat16, 64>(const PackParams&, cudaStream_t);
template cudaError_t launch_pack_layer<__nv_bfloat16, 128>(const PackParams&, cudaStream_t);
}  // namespace htree::tree_attention
