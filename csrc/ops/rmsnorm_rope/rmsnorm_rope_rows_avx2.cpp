#if defined(__x86_64__)
#define HTREE_AVX2
#include "host/cpu/simd.h"
// the body is compiled for the instruction set chosen above
#include "ops/rmsnorm_rope/rmsnorm_rope_rows_impl.h"

namespace htree::rmsnorm_rope {
const RowKernels kRowKernelsAvx2 = HTREE_ISA::row_kernels();
}
#endif
