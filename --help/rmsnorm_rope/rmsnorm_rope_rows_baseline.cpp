// Written by setup.py from csrc/instances.py.
#define HTREE_BASELINE
#include "host/cpu/simd.h"
#include "ops/rmsnorm_rope/rmsnorm_rope_rows_impl.h"

namespace htree::rmsnorm_rope {
constexpr RowKernels kRowKernelsBaseline = HTREE_ISA::row_kernels();
}  // namespace htree::rmsnorm_rope
