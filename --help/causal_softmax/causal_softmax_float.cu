// Written by setup.py from csrc/instances.py.
#include "ops/causal_softmax/causal_softmax_launch.cuh"

namespace htree::causal_softmax {
template cudaError_t launch_forward<float>(const KernelConfig&, const ForwardParams<float>&, cudaStream_t);
template cudaError_t launch_backward<float>(const KernelConfig&, const BackwardParams<float>&, cudaStream_t);
}  // namespace htree::causal_softmax
