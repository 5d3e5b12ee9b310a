// The product of e4m3 codes by cuBLASLt, where cublas_takes() in gemm_cuda.cpp allows it.
#pragma once

#include <ATen/core/Tensor.h>
#include <cuda_runtime_api.h>

#include "ops/fp8/gemm/gemm.h"

namespace htree::fp8 {

// Writes c = (a b) / (s_a s_b). `pdl`: the reciprocals of the scales may begin before the end of
// the kernel before them.
void cublas_gemm(const GemmArguments& g, GemmScale a_scale, GemmScale b_scale, const at::Tensor& c, bool pdl,
                 cudaStream_t stream);

}  // namespace htree::fp8
