#include "ops/tree_attention/cuda/backward/per_list/per_list_gradient_instances.cuh"

namespace htree::tree_attention {
HTREE_BLOCK_GRADIENT_INSTANCES(, __half, 128)
}  // namespace htree::tree_attention
