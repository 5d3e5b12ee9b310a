#define HTREE_BASELINE
#include "host/cpu/simd.h"
// the body is compiled for the instruction set chosen above
#include "ops/gated_mlp/gated_mlp_products_impl.h"

namespace htree::gated_mlp {
const ProductKernels kProductKernelsBaseline = HTREE_ISA::product_kernels();
}
