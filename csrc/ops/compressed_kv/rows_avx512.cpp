#if defined(__x86_64__)
#define HTREE_AVX512
#include "host/cpu/simd.h"
// the bodies are compiled for the instruction set chosen above
#include "ops/compressed_kv/rows_impl.h"
// after the rows
#include "ops/compressed_kv/attend_impl.h"

namespace htree::compressed_kv {
const RowKernels kRowKernelsAvx512 = HTREE_ISA::row_kernels();
}
#endif
