#include "ops/tree_attention/attention/union/union_instances.cuh"

namespace htree::tree_attention {
HTREE_UNION_INSTANCES(, __nv_bfloat16, 32)
}  // namespace htree::tree_attention
