// Written by setup.py from csrc/instances.py.
#define HTREE_BASELINE
#include "host/cpu/simd.h"
#include "ops/fp8/gemm/cpu/gemm_rows_impl.h"

namespace htree::fp8 {
constexpr GemmKernels kGemmKernelsBaseline = HTREE_ISA::gemm_kernels();
}  // namespace htree::fp8
