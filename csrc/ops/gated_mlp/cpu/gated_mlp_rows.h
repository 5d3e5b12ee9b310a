// The CPU kernels of the elementwise half of the gated MLP, one table per instruction set (host/cpu/isa.h).
#pragma once

#include <cstdint>

#include "host/cpu/simd_prelude.h"
#include "ops/gated_mlp/gated_mlp_params.h"

namespace htree::gated_mlp {

// Products are of type A: float, or double for double.
template <typename T, typename A>
struct GateKernels {
  // out = linear * act(acted)
  void (*forward)(Activation activation, int64_t count, const A* linear, const A* acted, T* out);
  // dlinear = dy act(acted), dacted = dy linear act'(acted), written over linear and acted
  void (*backward)(Activation activation, int64_t count, const T* dy, A* linear, A* acted);
};

struct RowKernels {
  GateKernels<float, float> for_float;
  GateKernels<Fp16, float> for_half;
  GateKernels<Bf16, float> for_bfloat16;
  GateKernels<double, double> for_double;
};

extern const RowKernels kRowKernelsBaseline;
extern const RowKernels kRowKernelsAvx2;
extern const RowKernels kRowKernelsAvx512;

}  // namespace htree::gated_mlp
