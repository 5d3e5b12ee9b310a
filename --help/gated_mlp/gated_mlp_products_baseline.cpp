// Written by setup.py from csrc/instances.py.
#define HTREE_BASELINE
#include "host/cpu/simd.h"
#include "ops/gated_mlp/cpu/gated_mlp_products_impl.h"

namespace htree::gated_mlp {
constexpr ProductKernels kProductKernelsBaseline = HTREE_ISA::product_kernels();
}  // namespace htree::gated_mlp
