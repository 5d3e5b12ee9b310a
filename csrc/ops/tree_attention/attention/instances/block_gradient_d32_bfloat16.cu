#include "ops/tree_attention/attention/block_gradient/block_gradient_instances.cuh"

namespace htree::tree_attention {
HTREE_BLOCK_GRADIENT_INSTANCES(, __nv_bfloat16, 32)
}  // namespace htree::tree_attention
