#include "ops/tree_attention/cuda/backward/shared_gather/shared_gather_gradient_instances.cuh"

namespace htree::tree_attention {
HTREE_UNION_GRADIENT_INSTANCES(, __half, 64)
}  // namespace htree::tree_attention
