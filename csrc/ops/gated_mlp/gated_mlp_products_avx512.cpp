#if defined(__x86_64__)
#define HTREE_AVX512
#include "host/cpu/simd.h"
// the body is compiled for the instruction set chosen above
#include "ops/gated_mlp/gated_mlp_products_impl.h"

namespace htree::gated_mlp {
const ProductKernels kProductKernelsAvx512 = HTREE_ISA::product_kernels();
}
#endif
