#include "ops/tree_attention/cuda/forward/per_list/per_list_instances.cuh"

namespace htree::tree_attention {
HTREE_BLOCK_INSTANCES(, __half, 64)
}  // namespace htree::tree_attention
