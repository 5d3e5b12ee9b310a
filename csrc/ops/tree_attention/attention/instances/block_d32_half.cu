#include "ops/tree_attention/attention/block/block_instances.cuh"

namespace htree::tree_attention {
HTREE_BLOCK_INSTANCES(, __half, 32)
}  // namespace htree::tree_attention
