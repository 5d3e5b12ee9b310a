#include "ops/gated_mlp/instances/launch_tile.cuh"

namespace htree::gated_mlp {
template cudaError_t launch_tile(const ForwardParams<__nv_bfloat16>&, const KernelConfig&, cudaStream_t);
}
