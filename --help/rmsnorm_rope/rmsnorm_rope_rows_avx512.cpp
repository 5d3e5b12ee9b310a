#if defined(__x86_64__)
// Written by setup.py from csrc/instances.py.
#define HTREE_AVX512
#include "host/cpu/simd.h"
#include "ops/rmsnorm_rope/rmsnorm_rope_rows_impl.h"

namespace htree::rmsnorm_rope {
constexpr RowKernels kRowKernelsAvx512 = HTREE_ISA::row_kernels();
}  // namespace htree::rmsnorm_rope
#endif
