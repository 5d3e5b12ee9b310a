// Written by setup.py from csrc/instances.py.
#include "ops/tree_attention/cuda/backward/general/general_gradient.cuh"

namespace htree::tree_attention {
template cudaError_t launch_general_delta<float>(const GeneralGradientParams&, cudaStream_t);
template cudaError_t launch_general_query_gradient<float>(const GeneralGradientParams&, const GeneralQueryGradient&, cudaStream_t);
template cudaError_t launch_general_key_gradient<float>(const GeneralGradientParams&, const GeneralKeyGradient&, cudaStream_t);
}  // namespace htree::tree_attention
