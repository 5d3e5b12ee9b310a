// Written by setup.py from csrc/instances.py.
#include "ops/causal_softmax/causal_softmax_launch.cuh"

namespace htree::causal_softmax {
template cudaError_t launch_forward<__half>(const KernelConfig&, const ForwardParams<__half>&, cudaStream_t);
template cudaError_t launch_backward<__half>(const KernelConfig&, const BackwardParams<__half>&, cudaStream_t);
}  // namespace htree::causal_softmax
