#include "ops/gated_mlp/instances/launch_tile.cuh"

namespace htree::gated_mlp {
template cudaError_t launch_tile(const ForwardParams<__nv_bfloat16>&, const KernelConfig&, cudaStream_t);

bool is_compiled_for_hopper() {
  using Tr = TileTraits<__nv_bfloat16, Activation::kSilu, 128, 4, 2, false>;
  cudaFuncAttributes attributes{};
  // The stub needs a handful of registers, the kernel all that its block can have.
  return cudaFuncGetAttributes(&attributes, tile_kernel<Tr>) == cudaSuccess && attributes.numRegs > 64;
}

}  // namespace htree::gated_mlp
