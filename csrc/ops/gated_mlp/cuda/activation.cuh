// The activations and their derivatives on the GPU, in fp32. docs/semantics/gated_mlp.md §3.2
#pragma once

#include "ops/gated_mlp/gated_mlp_params.h"

namespace htree::gated_mlp {

// 1 / (1 + e^-z) by the hardware's exp2 and reciprocal: relative error below 2^-20.
__device__ __forceinline__ float sigmoid(float z) {
  return __fdividef(1.0f, 1.0f + __expf(-z));
}

// The normal distribution function, see erfc_exponent.
__device__ __forceinline__ float normal_cdf(float z) {
  const float whole = fabsf(z) * kSqrtHalf;
  const float t = fminf(whole, kErfcLimit);
  float q = erfc_exponent(kErfcTerms - 1);
#pragma unroll
  for (int i = kErfcTerms - 2; i >= 0; --i) {
    q = fmaf(q, t, erfc_exponent(i));
  }
  const float lower = 0.5f * __expf(-t * q - (whole - t) * (whole + t));
  return z < 0.0f ? lower : 1.0f - lower;
}

// act(z); NaN for NaN, and for -infinity, as z * sigmoid(z) gives.
template <Activation kActivation>
__device__ __forceinline__ float activate(float z) {
  if constexpr (kActivation == Activation::kSilu) {
    return z * sigmoid(z);
  } else {
    return z * normal_cdf(z);
  }
}

// Returns act(z) and leaves act'(z) in `slope`: s (1 + z (1 - s)) with s = sigmoid(z), or Phi(z) + z phi(z).
template <Activation kActivation>
__device__ __forceinline__ float activate(float z, float& slope) {
  if constexpr (kActivation == Activation::kSilu) {
    const float s = sigmoid(z);
    slope = s * fmaf(z, 1.0f - s, 1.0f);
    return z * s;
  } else {
    const float cdf = normal_cdf(z);
    slope = fmaf(z, kNormalPeak * __expf(-0.5f * z * z), cdf);
    return z * cdf;
  }
}

}  // namespace htree::gated_mlp
