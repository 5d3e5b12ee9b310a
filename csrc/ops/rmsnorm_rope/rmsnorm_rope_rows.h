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

template <typename T, typename A = ArithmeticOf<T>>
struct NormRows {
  // y may not alias x.
  void (*forward)(const T* x, T* y, const RowShape<A>& shape, const TableRow<A>& tables);
  // dx may be null, and so may dw, to which the row is added. `scratch` holds a row.
  void (*backward)(const T* dy, const T* x, T* dx, A* dw, const RowShape<A>& shape, const TableRow<A>& tables,
                   A* scratch);
};

struct RowKernels {
  NormRows<float> for_float;
  NormRows<Fp16> for_half;
  NormRows<Bf16> for_bfloat16;
  NormRows<double> for_double;
};

extern const RowKernels kRowKernelsBaseline;
extern const RowKernels kRowKernelsAvx2;
extern const RowKernels kRowKernelsAvx512;

}  // namespace htree::rmsnorm_rope
