#include "ops/gated_mlp/instances/launch_vector.cuh"

namespace htree::gated_mlp {
template cudaError_t launch_vector(const ForwardParams<__nv_bfloat16>&, const KernelConfig&, cudaStream_t);
}
