#include "host/simd_baseline.h"
// the body is compiled for the instruction set chosen above
#include "ops/causal_softmax/causal_softmax_rows_impl.h"

namespace htree::causal_softmax {
const RowKernels kRowKernelsBaseline = HTREE_ISA::row_kernels();
}
