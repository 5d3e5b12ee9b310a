#include "ops/gated_mlp/instances/launch_vector.cuh"

namespace htree::gated_mlp {
template cudaError_t launch_vector(const ForwardParams<__half>&, const KernelConfig&, cudaStream_t);
}
