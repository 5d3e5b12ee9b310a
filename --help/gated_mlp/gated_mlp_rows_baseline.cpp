// Written by setup.py from csrc/instances.py.
#define HTREE_BASELINE
#include "host/cpu/simd.h"
#include "ops/gated_mlp/cpu/gated_mlp_rows_impl.h"

namespace htree::gated_mlp {
constexpr RowKernels kRowKernelsBaseline = HTREE_ISA::row_kernels();
}  // namespace htree::gated_mlp
