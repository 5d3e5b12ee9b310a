#if defined(__x86_64__)
#define HTREE_AVX512
#include "host/cpu/simd.h"
// the body is compiled for the instruction set chosen above
#include "ops/hadamard/hadamard_rows_impl.h"

namespace htree::hadamard {
const RowKernels kRowKernelsAvx512 = HTREE_ISA::row_kernels();
}
#endif
