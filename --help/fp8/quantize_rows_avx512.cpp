#if defined(__x86_64__)
// Written by setup.py from csrc/instances.py.
#define HTREE_AVX512
#include "host/cpu/simd.h"
#include "ops/fp8/quantize/quantize_rows_impl.h"

namespace htree::fp8 {
constexpr RowKernels kRowKernelsAvx512 = HTREE_ISA::row_kernels();
}  // namespace htree::fp8
#endif
