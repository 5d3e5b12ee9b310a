// Written by setup.py from csrc/instances.py.
#include "ops/hadamard/hadamard_launch.cuh"

namespace htree::hadamard {
template cudaError_t launch_long<__nv_bfloat16>(const Params<__nv_bfloat16>&, cudaStream_t);
}  // namespace htree::hadamard
