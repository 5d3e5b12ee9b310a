#define HTREE_BASELINE
#include "host/cpu/simd.h"
// the body is compiled for the instruction set chosen above
#include "ops/rmsnorm_rope/rmsnorm_rope_rows_impl.h"

namespace htree::rmsnorm_rope {
const RowKernels kRowKernelsBaseline = HTREE_ISA::row_kernels();
}
