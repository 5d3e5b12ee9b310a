#include "ops/fp8/gemm/instances/launch_gemm.cuh"

namespace htree::fp8 {
template cudaError_t launch_gemm_tile(const GemmParams<__half>&, const GemmConfig&, cudaStream_t);
template cudaError_t launch_gemm_stream(const GemmParams<__half>&, const GemmConfig&, cudaStream_t);

bool gemm_is_compiled_for_hopper() {
  cudaFuncAttributes attributes{};
  // The stub needs a handful of registers, the kernel all that its block can have.
  return cudaFuncGetAttributes(&attributes, gemm_tile_kernel<GemmTileTraits<__half, 256, 128, 4, 128>>) ==
             cudaSuccess &&
         attributes.numRegs > 64;
}

}  // namespace htree::fp8
