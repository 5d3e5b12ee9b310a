// Written by setup.py from csrc/instances.py.
#include "ops/rmsnorm_rope/rmsnorm_rope_launch.cuh"

namespace htree::rmsnorm_rope {
template cudaError_t launch_sum<float>(const SumParams<float>&, cudaStream_t);
template cudaError_t launch_sum<double>(const SumParams<double>&, cudaStream_t);
}  // namespace htree::rmsnorm_rope
