#include "ops/gated_mlp/instances/launch_stream.cuh"

namespace htree::gated_mlp {
template cudaError_t launch_stream(const ForwardParams<__half>&, const KernelConfig&, cudaStream_t);
}
