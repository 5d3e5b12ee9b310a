// Written by setup.py from csrc/instances.py.
#include "ops/rmsnorm_rope/rmsnorm_rope_launch.cuh"

namespace htree::rmsnorm_rope {
template cudaError_t launch_forward<__half>(const KernelConfig&, const ForwardParams<__half>&, int, bool, cudaStream_t);
}  // namespace htree::rmsnorm_rope
