#include "ops/rmsnorm_rope/instances/launch_backward.cuh"

namespace htree::rmsnorm_rope {
template bool launch_backward<float>(const KernelConfig&, const BackwardParams<float>&, int, cudaStream_t);
}  // namespace htree::rmsnorm_rope
