// Written by setup.py from csrc/instances.py.
#include "ops/causal_softmax/causal_softmax_launch.cuh"

namespace htree::causal_softmax {
template cudaError_t launch_forward<__nv_bfloat16>(const KernelConfig&, const ForwardParams<__nv_bfloat16>&, cudaStream_t);
template cudaError_t launch_backward<__nv_bfloat16>(const KernelConfig&, const BackwardParams<__nv_bfloat16>&, cudaStream_t);
}  // namespace htree::causal_softmax
