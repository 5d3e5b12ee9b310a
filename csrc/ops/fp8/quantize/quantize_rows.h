// The CPU kernels of quantisation on runs of contiguous elements, one table
// per instruction set (host/cpu/isa.h).
#pragma once

#include <cstdint>

#include "host/cpu/simd_prelude.h"

namespace htree::fp8 {

// The scale of each element of a run. `stride` is 0 where all share one, 1 where each has its own.
struct RunScale {
  const float* data;
  int64_t stride;
};

template <typename T>
struct RunKernels {
  // The largest finite magnitude; 0 where there is none.
  float (*largest)(const T* x, int64_t n);
  // largest[i] = max(largest[i], |x[i]|) for finite x[i].
  void (*fold_largest)(const T* x, float* largest, int64_t n);
  // Writes the codes and returns the number of overflows.
  int64_t (*encode)(const T* x, RunScale scale, uint8_t* codes, int64_t n);
  void (*decode)(const uint8_t* codes, RunScale scale, T* out, int64_t n);
  // Quantises and dequantises. y must not be x.
  void (*round)(const T* x, RunScale scale, T* y, int64_t n);
  // dx = dy where |x * scale| <= 448, else 0.
  void (*round_backward)(const T* dy, const T* x, RunScale scale, T* dx, int64_t n);
};

struct RowKernels {
  RunKernels<float> for_float;
  RunKernels<Fp16> for_half;
  RunKernels<Bf16> for_bfloat16;
};

extern const RowKernels kRowKernelsBaseline;
extern const RowKernels kRowKernelsAvx2;
extern const RowKernels kRowKernelsAvx512;

}  // namespace htree::fp8
