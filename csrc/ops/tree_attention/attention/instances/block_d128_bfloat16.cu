#include "ops/tree_attention/cuda/forward/per_list/per_list_instances.cuh"

namespace htree::tree_attention {
HTREE_BLOCK_INSTANCES(, __nv_bfloat16, 128)
}  // namespace htree::tree_attention
