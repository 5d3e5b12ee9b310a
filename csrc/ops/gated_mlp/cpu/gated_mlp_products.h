// The CPU kernels of the products of the gated MLP, one table per instruction set (host/cpu/isa.h).
#pragma once

#include "host/cpu/row_products.h"
#include "host/cpu/simd_prelude.h"

namespace htree::gated_mlp {

// For weights of type T, read as they are.
template <typename T>
struct TypedProducts {
  // A padded row of x: `width` elements, of which `count` are given.
  void (*widen)(const T* from, int64_t count, float* to, int64_t width);
  void (*multiply)(const RowProducts<float, T, float>& products);
  // to = from rounded to T
  void (*round)(const float* from, T* to, int64_t count);
};

struct ProductKernels {
  TypedProducts<float> for_float;
  TypedProducts<Fp16> for_half;
  TypedProducts<Bf16> for_bfloat16;
};

extern const ProductKernels kProductKernelsBaseline;
extern const ProductKernels kProductKernelsAvx2;
extern const ProductKernels kProductKernelsAvx512;

#if defined(__x86_64__)
// By the instructions of AVX512_BF16, which multiply and add two pairs of bf16 per lane in fp32, twice as
// fast as fp32. Subnormal operands and results count as 0.
void multiply_bf16_pairs(const RowProducts<Bf16, Bf16, float>& products);
#endif

}  // namespace htree::gated_mlp
