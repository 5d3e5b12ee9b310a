#include "ops/rmsnorm_rope/instances/launch_forward.cuh"

namespace htree::rmsnorm_rope {
template bool launch_forward<__nv_bfloat16>(const KernelConfig&, const ForwardParams<__nv_bfloat16>&, int,
                                            cudaStream_t);
}  // namespace htree::rmsnorm_rope
