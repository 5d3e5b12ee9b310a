// Torch-free launchers of fp8_gemm for results of float, __half and __nv_bfloat16; csrc/instances.py lists
// them. cudaErrorNotSupported: the configuration is not compiled.
#pragma once

#include <cuda_runtime_api.h>

#include "ops/fp8/gemm/gemm_config.h"
#include "ops/fp8/gemm/gemm_params.h"

namespace htree::fp8 {

template <typename Out>
cudaError_t launch_gemm_tile(const GemmParams<Out>& params, const GemmConfig& config, cudaStream_t stream);
template <typename Out>
cudaError_t launch_gemm_stream(const GemmParams<Out>& params, const GemmConfig& config, cudaStream_t stream);

// out_a[i] = 1 / a[i * stride], i < num_a, and the same for b: cuBLAS multiplies by its scales. Where both
// are single, two factors of 1 / (a b) with about equal exponents. `pdl`: programmatic dependent launch
// (sm_90 and later).
cudaError_t launch_reciprocals(GemmScale a, int64_t num_a, float* out_a, GemmScale b, int64_t num_b,
                               float* out_b, bool pdl, cudaStream_t stream);

}  // namespace htree::fp8
