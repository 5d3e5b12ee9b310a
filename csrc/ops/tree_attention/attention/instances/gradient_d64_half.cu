#include "ops/tree_attention/cuda/backward/gradient_instances.cuh"

namespace htree::tree_attention {
HTREE_TREE_GRADIENT_INSTANCES(, __half, 64)
}  // namespace htree::tree_attention
