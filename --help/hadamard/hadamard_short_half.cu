// Written by setup.py from csrc/instances.py.
#include "ops/hadamard/hadamard_launch.cuh"

namespace htree::hadamard {
template cudaError_t launch_short<__half>(const Params<__half>&, cudaStream_t);
}  // namespace htree::hadamard
