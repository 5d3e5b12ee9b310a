#if defined(__x86_64__)
#define HTREE_AVX512
#include "host/cpu/simd.h"
// the body is compiled for the instruction set chosen above
#include "ops/tree_attention/cpu/query_kernels_impl.h"

namespace htree::tree_attention {
const QueryKernels<float> kQueryKernelsAvx512 = HTREE_ISA::query::query_kernels<float>();
}  // namespace htree::tree_attention
#endif
