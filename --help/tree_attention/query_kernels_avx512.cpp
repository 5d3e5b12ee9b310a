#if defined(__x86_64__)
// Written by setup.py from csrc/instances.py.
#define HTREE_AVX512
#include "host/cpu/simd.h"
#include "ops/tree_attention/cpu/query_kernels_impl.h"

namespace htree::tree_attention {
constexpr QueryKernels<float> kQueryKernelsAvx512 = HTREE_ISA::query::query_kernels<float>();
}  // namespace htree::tree_attention
#endif
