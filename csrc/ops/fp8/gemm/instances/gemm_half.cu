#include "device/hopper_probe.cuh"
#include "ops/fp8/gemm/instances/launch_gemm.cuh"

namespace htree::fp8 {
template cudaError_t launch_gemm_tile(const GemmParams<__half>&, const GemmConfig&, cudaStream_t);
template cudaError_t launch_gemm_stream(const GemmParams<__half>&, const GemmConfig&, cudaStream_t);

bool gemm_is_compiled_for_hopper() {
  return device::hopper_kernels_compiled();
}

}  // namespace htree::fp8
