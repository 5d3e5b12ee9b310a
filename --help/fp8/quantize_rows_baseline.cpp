// Written by setup.py from csrc/instances.py.
#define HTREE_BASELINE
#include "host/cpu/simd.h"
#include "ops/fp8/quantize/quantize_rows_impl.h"

namespace htree::fp8 {
constexpr RowKernels kRowKernelsBaseline = HTREE_ISA::row_kernels();
}  // namespace htree::fp8
