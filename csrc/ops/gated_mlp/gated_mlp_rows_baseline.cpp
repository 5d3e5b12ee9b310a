#define HTREE_BASELINE
#include "host/cpu/simd.h"
// the body is compiled for the instruction set chosen above
#include "ops/gated_mlp/gated_mlp_rows_impl.h"

namespace htree::gated_mlp {
const RowKernels kRowKernelsBaseline = HTREE_ISA::row_kernels();
}
