// Written by setup.py from csrc/instances.py.
#include "ops/tree_attention/cuda/backward/masked_rows/gradients.cuh"

namespace htree::tree_attention {
template cudaError_t launch_masked_row_tiles<__half, 32>(const MaskedGradientParams&, cudaStream_t);
template cudaError_t launch_masked_query_gradient<__half, 32>(const MaskedGradientParams&, cudaStream_t);
template cudaError_t launch_masked_key_gradient<__half, 32>(const MaskedGradientParams&, cudaStream_t);
}  // namespace htree::tree_attention
