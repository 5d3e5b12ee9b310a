#include "ops/rmsnorm_rope/instances/launch_backward.cuh"

namespace htree::rmsnorm_rope {
template bool launch_backward<__half>(const KernelConfig&, const BackwardParams<__half>&, int, cudaStream_t);
}  // namespace htree::rmsnorm_rope
