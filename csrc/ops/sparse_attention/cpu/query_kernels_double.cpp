// The query kernels of double, compiled for the baseline alone: the result is the same on every machine.
#define HTREE_BASELINE
#include "host/cpu/simd.h"
// The body is compiled for the instruction set chosen above.
#include "ops/sparse_attention/cpu/query_kernels_impl.h"

namespace htree::tree_attention {
const QueryKernels<double> kQueryKernelsDouble = HTREE_ISA::query::query_kernels<double>();
}  // namespace htree::tree_attention
