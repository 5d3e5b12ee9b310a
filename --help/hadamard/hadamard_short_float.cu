// Written by setup.py from csrc/instances.py.
#include "ops/hadamard/hadamard_launch.cuh"

namespace htree::hadamard {
template cudaError_t launch_short<float>(const Params<float>&, cudaStream_t);
}  // namespace htree::hadamard
