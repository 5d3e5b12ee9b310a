// What the CPU files of the family share: the tables of their kernels by dtype, and the forward of
// gated_mlp_fused_cpu.cpp.
#pragma once

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

// Whether fused_forward_cpu takes a problem: weights in rows, no fp64, no fp32 with many rows of x, and
// without AVX2 only so few rows that reading the weights takes most of the time.
bool is_fused(const Operands& operands);
// forward_cpu by our own products, with the elementwise part in the same pass.
void fused_forward_cpu(const Operands& operands, const Results& results);

}  // namespace htree::gated_mlp
