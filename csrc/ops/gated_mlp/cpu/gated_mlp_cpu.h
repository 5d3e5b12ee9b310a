// What the CPU files of the family share: the tables of their kernels by dtype, and the forward of
// gated_mlp_fused_cpu.cpp.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "host/cpu/isa.h"
#include "host/cpu/storage.h"
#include "ops/gated_mlp/cpu/gated_mlp_products.h"
#include "ops/gated_mlp/cpu/gated_mlp_rows.h"
#include "ops/gated_mlp/gated_mlp.h"

namespace htree::gated_mlp {

inline const RowKernels& row_kernels() {
  return HTREE_PICK_ISA(kRowKernels);
}
inline const ProductKernels& product_kernels() {
  return HTREE_PICK_ISA(kProductKernels);
}

template <typename T>
struct KernelsOf;
template <>
struct KernelsOf<float> {
  static auto gate() { return row_kernels().of_float; }
  static auto products() { return product_kernels().of_float; }
};
template <>
struct KernelsOf<c10::Half> {
  static auto gate() { return row_kernels().of_half; }
  static auto products() { return product_kernels().of_half; }
};
template <>
struct KernelsOf<c10::BFloat16> {
  static auto gate() { return row_kernels().of_bfloat16; }
  static auto products() { return product_kernels().of_bfloat16; }
};
template <>
struct KernelsOf<double> {
  static auto gate() { return row_kernels().of_double; }
};

// Whether fused_forward_cpu takes a problem: weights in rows, no fp64, no fp32 with many rows of x, and
// without AVX2 only so few rows that reading the weights takes most of the time.
bool is_fused(const Operands& operands);
// forward_cpu by our own products, with the elementwise part in the same pass.
void fused_forward_cpu(const Operands& operands, const Results& results);

}  // namespace htree::gated_mlp
