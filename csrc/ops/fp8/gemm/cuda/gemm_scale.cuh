// The scales of fp8_gemm, by which its sums are divided, as factors whose products stay in the range of fp32
// wherever the result does. docs/semantics/fp8.md §3.3
#pragma once

#include <cstdint>

#include "ops/fp8/gemm/gemm_params.h"

namespace htree::fp8 {

// first * second = 1 / scale. `second` is 1 for scales in [2^-62, 2^63): the product of two inverses of those
// is normal. For other scales each factor has about half of the exponent. A sum s, whose exponent is -18 ...
// 50, times both first factors then lies, in powers of two, about midway between s and the result.
struct ScaleFactors {
  float first;
  float second;
};

// For a positive finite scale, subnormal ones included.
__device__ __forceinline__ ScaleFactors split_inverse(float scale) {
  const int exponent = (__float_as_int(scale) >> 23 & 0xff) - 127;
  const bool plain = exponent > -63 && exponent < 63;
  const float second = plain ? 1.0f : __int_as_float((127 - exponent / 2) << 23);
  return {1.0f / (scale * second), second};
}

// The scale of row or column `index`, which may lie beyond the last.
__device__ __forceinline__ float fetch_scale(const GemmScale& scale, int64_t index, int64_t count) {
  return scale.data[(index < count ? index : count - 1) * scale.stride];
}

// The product of two factors, kept finite so that a sum of zero stays zero.
__device__ __forceinline__ float joint_factor(float by_row, float by_column) {
  return fminf(by_row * by_column, 3.402823466e38f);
}
__device__ __forceinline__ ScaleFactors joint_factors(const ScaleFactors& by_row,
                                                      const ScaleFactors& by_column) {
  return {joint_factor(by_row.first, by_column.first), joint_factor(by_row.second, by_column.second)};
}

}  // namespace htree::fp8
