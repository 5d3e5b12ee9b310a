// Written by setup.py from csrc/instances.py.
#include "ops/gated_mlp/cuda/gated_mlp_launch.cuh"

namespace htree::gated_mlp {
template cudaError_t launch_turned(const ForwardParams<__half>&, const KernelConfig&, cudaStream_t);
}  // namespace htree::gated_mlp
