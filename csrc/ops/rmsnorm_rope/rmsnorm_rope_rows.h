// The CPU row kernels of rmsnorm_rope, one table per instruction set (host/cpu/isa.h).
#pragma once

#include <cstdint>

#include "host/cpu/simd_prelude.h"
#include "ops/rmsnorm_rope/rmsnorm_rope_params.h"

namespace htree::rmsnorm_rope {

// The factors of one position for the lower and for the upper half of a head, [head_dim / 2] each.
template <typename A>
struct TableRow {
  const A* cos_lower;
  const A* cos_upper;
  const A* sin_lower;
  const A* sin_upper;
};

// Rows of num_heads * head_dim elements; weight has as many.
template <typename A>
struct RowShape {
  int64_t num_heads;
  int64_t head_dim;
  A eps;
  const A* weight;
};

// y may not alias x.
template <typename T>
using ForwardRow = void (*)(const T* x, T* y, const RowShape<ArithmeticOf<T>>& shape,
                            const TableRow<ArithmeticOf<T>>& tables);
// dx may be null, and so may dw, to which the row is added. `scratch` holds a row.
template <typename T>
using BackwardRow = void (*)(const T* dy, const T* x, T* dx, ArithmeticOf<T>* dw,
                             const RowShape<ArithmeticOf<T>>& shape, const TableRow<ArithmeticOf<T>>& tables,
                             ArithmeticOf<T>* scratch);

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

}  // namespace htree::rmsnorm_rope
