#include "ops/tree_attention/attention/union_gradient/union_gradient_instances.cuh"

namespace htree::tree_attention {
HTREE_UNION_GRADIENT_INSTANCES(, __half, 32)
}  // namespace htree::tree_attention
