#define HTREE_BASELINE
#include "host/cpu/simd.h"
// the body is compiled for the instruction set chosen above
#include "ops/fp8/quantize/quantize_rows_impl.h"

namespace htree::fp8 {
const RowKernels kRowKernelsBaseline = HTREE_ISA::row_kernels();
}
