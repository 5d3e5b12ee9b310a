// Written by setup.py from csrc/instances.py.
#include "ops/hadamard/hadamard_launch.cuh"

namespace htree::hadamard {
template cudaError_t launch_join_halves<double>(const Params<double>&, cudaStream_t);
}  // namespace htree::hadamard
