#include "ops/rmsnorm_rope/instances/launch_forward.cuh"

namespace htree::rmsnorm_rope {
template bool launch_forward<double>(const KernelConfig&, const ForwardParams<double>&, int, cudaStream_t);
}  // namespace htree::rmsnorm_rope
