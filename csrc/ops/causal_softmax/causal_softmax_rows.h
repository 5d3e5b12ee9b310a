// The CPU row kernels of causal_softmax, one table per instruction set (host/cpu/isa.h).
#pragma once

#include <cstdint>

#include "host/cpu/simd_prelude.h"

namespace htree::causal_softmax {

// A row of `cols` scores at unit stride, of which the first `visible` >= 1 take part. y may be x. `scratch`
// holds `cols` floats, or doubles for double.
template <typename T>
using ForwardRow = void (*)(const T* x, T* y, int64_t visible, int64_t cols, void* scratch);
// dx may not alias dy or y.
template <typename T>
using BackwardRow = void (*)(const T* dy, const T* y, T* dx, int64_t visible, int64_t cols);

struct RowKernels {
  ForwardRow<float> forward_float;
  ForwardRow<Fp16> forward_half;
  ForwardRow<Bf16> forward_bfloat16;
  ForwardRow<double> forward_double;
  BackwardRow<float> backward_float;
  BackwardRow<Fp16> backward_half;
  BackwardRow<Bf16> backward_bfloat16;
  BackwardRow<double> backward_double;
};

extern const RowKernels kRowKernelsBaseline;
extern const RowKernels kRowKernelsAvx2;
extern const RowKernels kRowKernelsAvx512;

}  // namespace htree::causal_softmax
