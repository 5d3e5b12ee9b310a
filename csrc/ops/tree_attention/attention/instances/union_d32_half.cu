#include "ops/tree_attention/cuda/forward/shared_gather/shared_gather_instances.cuh"

namespace htree::tree_attention {
HTREE_UNION_INSTANCES(, __half, 32)
}  // namespace htree::tree_attention
