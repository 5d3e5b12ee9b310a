// The CPU row kernels of the hadamard family, one table per instruction set (host/cpu/isa.h).
#pragma once

#include <cstdint>

#include "host/cpu/simd_prelude.h"

namespace htree::hadamard {

// Rows of 2^log2_length elements, `stride` elements apart. Element i of a row lies at
// (i >> log2_segment) * segment_stride + (i mod 2^log2_segment).
template <typename T>
struct RowRun {
  T* data;
  int64_t stride;
  int64_t segment_stride;
};

struct RunShape {
  int64_t num_rows;
  int log2_length;
  int log2_segment;
  double scale;
};

// y is x, or shares no memory with it. `scratch` holds scratch_bytes() and is aligned to 64 bytes.
template <typename T>
using TransformRows = void (*)(const RowRun<const T>& x, const RowRun<T>& y, const RunShape& shape,
                               void* scratch);

// The row in arithmetic precision, and a contiguous copy of it in its storage type.
constexpr int64_t scratch_bytes(int64_t element_size, int log2_length) {
  const int64_t arithmetic = element_size == 8 ? 8 : 4;
  return ((arithmetic + element_size) << log2_length) + 256;
}

struct RowKernels {
  TransformRows<float> for_float;
  TransformRows<Fp16> for_half;
  TransformRows<Bf16> for_bfloat16;
  TransformRows<double> for_double;
};

extern const RowKernels kRowKernelsBaseline;
extern const RowKernels kRowKernelsAvx2;
extern const RowKernels kRowKernelsAvx512;

}  // namespace htree::hadamard
