#include "ops/rmsnorm_rope/instances/launch_forward.cuh"

namespace htree::rmsnorm_rope {
template bool launch_forward<float>(const KernelConfig&, const ForwardParams<float>&, int, cudaStream_t);
}  // namespace htree::rmsnorm_rope
