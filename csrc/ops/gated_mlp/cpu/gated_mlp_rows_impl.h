// The CPU kernels of gated_mlp_rows.h, compiled per instruction
// set after host/cpu/simd.h (csrc/instances.py).
#pragma once

#include "host/cpu/simd.h"
#include "ops/gated_mlp/cpu/gated_mlp_rows.h"

namespace htree::HTREE_ISA {

using gated_mlp::Activation;

template <typename Vec>
struct ActedAndSlope {
  Vec value;
  Vec slope;
};

// For large x exp(x) is +infinity, and 1 / infinity gives 0, the right result.
template <typename Vec>
inline ActedAndSlope<Vec> silu(Vec z) {
  const Vec s = 1 / (1 + exp(-z));
  return {z * s, s * (1 + z * (1 - s))};
}

// The normal distribution function, see erfc_exponent().
inline VecF normal_cdf(VecF z) {
  const VecF whole = (z < 0 ? -z : z) * gated_mlp::kSqrtHalf;
  const VecF t = whole > gated_mlp::kErfcLimit ? splat(gated_mlp::kErfcLimit) : whole;
  VecF q = splat(gated_mlp::erfc_exponent(gated_mlp::kErfcTerms - 1));
  for (int i = gated_mlp::kErfcTerms - 2; i >= 0; --i) {
    q = q * t + gated_mlp::erfc_exponent(i);
  }
  const VecF lower = 0.5f * exp(-t * q - (whole - t) * (whole + t));
  return z < 0 ? lower : 1 - lower;
}

inline VecD normal_cdf(VecD z) {
  VecD y = z;
  for (int i = 0; i < kLanesOf<VecD>; ++i) {
    y[i] = 0.5 * std::erfc(-z[i] * 0.70710678118654752440);
  }
  return y;
}

template <typename Vec>
inline ActedAndSlope<Vec> gelu(Vec z) {
  constexpr double kPeak = 0.39894228040143267794;  // 1 / sqrt(2 pi)
  using Scalar = std::remove_reference_t<decltype(z[0] + z[0])>;
  const Vec cdf = normal_cdf(z);
  return {z * cdf, cdf + z * (static_cast<Scalar>(kPeak) * exp(z * z * static_cast<Scalar>(-0.5)))};
}

template <Activation kActivation, typename Vec>
inline ActedAndSlope<Vec> acted_and_slope(Vec z) {
  if constexpr (kActivation == Activation::kSilu) {
    return silu(z);
  } else {
    return gelu(z);
  }
}

template <Activation kActivation, typename T, typename A>
void gate_forward(int64_t count, const A* linear, const A* acted, T* out) {
  for_vectors<T>(count, [&](int64_t i, auto lanes) {
    const auto act = acted_and_slope<kActivation>(load_lanes(acted + i, lanes));
    store_lanes(out + i, load_lanes(linear + i, lanes) * act.value, lanes);
  });
}

template <Activation kActivation, typename T, typename A>
void gate_backward(int64_t count, const T* dy, A* linear, A* acted) {
  for_vectors<T>(count, [&](int64_t i, auto lanes) {
    const auto d = load_lanes(dy + i, lanes);
    const auto act = acted_and_slope<kActivation>(load_lanes(acted + i, lanes));
    store_lanes(acted + i, d * load_lanes(linear + i, lanes) * act.slope, lanes);
    store_lanes(linear + i, d * act.value, lanes);
  });
}

template <typename T, typename A>
constexpr gated_mlp::GateKernels<T, A> gate_kernels() {
  return {[](Activation activation, int64_t count, const A* linear, const A* acted, T* out) {
            activation == Activation::kSilu ? gate_forward<Activation::kSilu>(count, linear, acted, out)
                                            : gate_forward<Activation::kGelu>(count, linear, acted, out);
          },
          [](Activation activation, int64_t count, const T* dy, A* linear, A* acted) {
            activation == Activation::kSilu ? gate_backward<Activation::kSilu>(count, dy, linear, acted)
                                            : gate_backward<Activation::kGelu>(count, dy, linear, acted);
          }};
}

constexpr gated_mlp::RowKernels row_kernels() {
  return {gate_kernels<float, float>(), gate_kernels<Fp16, float>(), gate_kernels<Bf16, float>(),
          gate_kernels<double, double>()};
}

}  // namespace htree::HTREE_ISA
