// Written by setup.py from csrc/instances.py.
#define HTREE_BASELINE
#include "host/cpu/simd.h"
#include "ops/compressed_kv/rows_impl.h"

namespace htree::compressed_kv {
constexpr RowKernels kRowKernelsBaseline = HTREE_ISA::row_kernels();
}  // namespace htree::compressed_kv
