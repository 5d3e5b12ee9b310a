#define HTREE_BASELINE
#include "host/cpu/simd.h"
// the body is compiled for the instruction set chosen above
#include "ops/tree_attention/cpu/query_kernels_impl.h"

namespace htree::tree_attention {
const QueryKernels<float> kQueryKernelsBaseline = HTREE_ISA::query::query_kernels<float>();
const QueryKernels<double> kQueryKernelsDouble = HTREE_ISA::query::query_kernels<double>();
}  // namespace htree::tree_attention
