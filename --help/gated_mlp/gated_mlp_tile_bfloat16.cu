// Written by setup.py from csrc/instances.py.
#include "ops/gated_mlp/cuda/gated_mlp_launch.cuh"

namespace htree::gated_mlp {
template cudaError_t launch_tile(const ForwardParams<__nv_bfloat16>&, const KernelConfig&, cudaStream_t);
}  // namespace htree::gated_mlp
