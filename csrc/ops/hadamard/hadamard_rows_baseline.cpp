#define HTREE_BASELINE
#include "host/cpu/simd.h"
// the body is compiled for the instruction set chosen above
#include "ops/hadamard/hadamard_rows_impl.h"

namespace htree::hadamard {
const RowKernels kRowKernelsBaseline = HTREE_ISA::row_kernels();
}
