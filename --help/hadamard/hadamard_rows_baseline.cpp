// Written by setup.py from csrc/instances.py.
#define HTREE_BASELINE
#include "host/cpu/simd.h"
#include "ops/hadamard/hadamard_rows_impl.h"

namespace htree::hadamard {
constexpr RowKernels kRowKernelsBaseline = HTREE_ISA::row_kernels();
}  // namespace htree::hadamard
