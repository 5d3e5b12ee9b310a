// The CPU kernels of fp8_gemm, one table per instruction set (host/cpu/isa.h).
#pragma once

#include "host/cpu/row_products.h"
#include "host/cpu/simd_prelude.h"

namespace htree::fp8 {

// out[i] = sums[i] / a_scale / b_scale[i] in fp64, rounded to fp32 and then to T, for i < count. sums and
// b_scale can be read up to the next multiple of 16.
template <typename T>
using StoreQuotients = void (*)(const double* sums, int64_t count, double a_scale, const double* b_scale,
                                T* out);

struct GemmKernels {
  // Writes a padded row: the values of `count` codes, then zeros up to `width` elements.
  void (*widen)(const uint8_t* codes, int64_t count, float* to, int64_t width);
  void (*multiply_codes)(const RowProducts<float, uint8_t, double>& products);
  void (*multiply_values)(const RowProducts<float, float, double>& products);
  StoreQuotients<float> for_float;
  StoreQuotients<Fp16> for_half;
  StoreQuotients<Bf16> for_bfloat16;
};

extern const GemmKernels kGemmKernelsBaseline;
extern const GemmKernels kGemmKernelsAvx2;
extern const GemmKernels kGemmKernelsAvx512;

}  // namespace htree::fp8
