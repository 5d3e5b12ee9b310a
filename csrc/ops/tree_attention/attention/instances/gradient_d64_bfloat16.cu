#include "ops/tree_attention/cuda/backward/gradient_instances.cuh"

namespace htree::tree_attention {
HTREE_TREE_GRADIENT_INSTANCES(, __nv_bfloat16, 64)
}  // namespace htree::tree_attention
