#if defined(__x86_64__)
// Written by setup.py from csrc/instances.py.
#define HTREE_AVX512
#include "host/cpu/simd.h"
#include "ops/gated_mlp/cpu/gated_mlp_products_impl.h"

namespace htree::gated_mlp {
constexpr ProductKernels kProductKernelsAvx512 = HTREE_ISA::product_kernels();
}  // namespace htree::gated_mlp
#endif
