// Written by setup.py from csrc/instances.py.
#include "ops/causal_softmax/causal_softmax_launch.cuh"

namespace htree::causal_softmax {
template cudaError_t launch_forward<double>(const KernelConfig&, const ForwardParams<double>&, cudaStream_t);
template cudaError_t launch_backward<double>(const KernelConfig&, const BackwardParams<double>&, cudaStream_t);
}  // namespace htree::causal_softmax
