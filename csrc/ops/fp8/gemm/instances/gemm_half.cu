#include "ops/fp8/gemm/instances/launch_gemm.cuh"

namespace htree::fp8 {
template cudaError_t launch_gemm_tile(const GemmParams<__half>&, const GemmConfig&, cudaStream_t);
template cudaError_t launch_gemm_stream(const GemmParams<__half>&, const GemmConfig&, cudaStream_t);
}  // namespace htree::fp8
