// Written by setup.py from csrc/instances.py.
#include "ops/tree_attention/cuda/backward/general/general_gradient.cuh"

namespace htree::tree_attention {
template cudaError_t launch_general_delta<__half>(const GeneralGradientParams&, cudaStream_t);
template cudaError_t launch_general_query_gradient<__half>(const GeneralGradientParams&, const GeneralQueryGradient&, cudaStream_t);
template cudaError_t launch_general_key_gradient<__half>(const GeneralGradientParams&, const GeneralKeyGradient&, cudaStream_t);
}  // namespace htree::tree_attention
