// Written by setup.py from csrc/instances.py.
#include "ops/fp8/gemm/cuda/gemm_launch.cuh"

namespace htree::fp8 {
template cudaError_t launch_gemm_tile(const GemmParams<float>&, const GemmConfig&, cudaStream_t);
template cudaError_t launch_gemm_stream(const GemmParams<float>&, const GemmConfig&, cudaStream_t);
}  // namespace htree::fp8
