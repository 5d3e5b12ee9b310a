#include "ops/rmsnorm_rope/instances/launch_forward.cuh"

namespace htree::rmsnorm_rope {
template bool launch_forward<__half>(const KernelConfig&, const ForwardParams<__half>&, int, cudaStream_t);
}  // namespace htree::rmsnorm_rope
