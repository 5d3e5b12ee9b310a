// Written by setup.py from csrc/instances.py.
#include "ops/tree_attention/cuda/backward/general/general_gradient.cuh"

namespace htree::tree_attention {
template cudaError_t launch_general_delta<__nv_bfloat16>(const GeneralGradientParams&, cudaStream_t);
template cudaError_t launch_general_query_gradient<__nv_bfloat16>(const GeneralGradientParams&, const GeneralQueryGradient&, cudaStream_t);
template cudaError_t launch_general_key_gradient<__nv_bfloat16>(const GeneralGradientParams&, const GeneralKeyGradient&, cudaStream_t);
}  // namespace htree::tree_attention
