#include "ops/rmsnorm_rope/instances/launch_backward.cuh"

namespace htree::rmsnorm_rope {
template bool launch_backward<double>(const KernelConfig&, const BackwardParams<double>&, int, cudaStream_t);
}  // namespace htree::rmsnorm_rope
