#include "ops/rmsnorm_rope/instances/launch_backward.cuh"

namespace htree::rmsnorm_rope {
template bool launch_backward<__nv_bfloat16>(const KernelConfig&, const BackwardParams<__nv_bfloat16>&, int,
                                             cudaStream_t);
}  // namespace htree::rmsnorm_rope
