// The query kernels of double, which every machine runs at the baseline level: one result everywhere.
#define HTREE_BASELINE
#include "host/cpu/simd.h"
// the body is compiled for the instruction set chosen above
#include "ops/tree_attention/cpu/query_kernels_impl.h"

namespace htree::tree_attention {
const QueryKernels<double> kQueryKernelsDouble = HTREE_ISA::query::query_kernels<double>();
}  // namespace htree::tree_attention
