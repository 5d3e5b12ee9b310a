// The CPU row kernels of causal_softmax, one table per instruction set (host/cpu/isa.h).
#pragma once

#include <cstdint>

#include "host/cpu/simd_prelude.h"

namespace htree::causal_softmax {

template <typename T>
struct SoftmaxRows {
  // A row of `cols` scores at unit stride, of which the first `visible` >= 1 take part. y may be x. `scratch`
  // holds `cols` floats, or doubles for double.
  void (*forward)(const T* x, T* y, int64_t visible, int64_t cols, void* scratch);
  // dx may not alias dy or y.
  void (*backward)(const T* dy, const T* y, T* dx, int64_t visible, int64_t cols);
};

struct RowKernels {
  SoftmaxRows<float> for_float;
  SoftmaxRows<Fp16> for_half;
  SoftmaxRows<Bf16> for_bfloat16;
  SoftmaxRows<double> for_double;
};

extern const RowKernels kRowKernelsBaseline;
extern const RowKernels kRowKernelsAvx2;
extern const RowKernels kRowKernelsAvx512;

}  // namespace htree::causal_softmax
