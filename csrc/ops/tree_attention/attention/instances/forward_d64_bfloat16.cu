#include "ops/tree_attention/attention/tensor_core_instances.cuh"

namespace htree::tree_attention {
HTREE_TREE_ATTENTION_INSTANCES(, __nv_bfloat16, 64)
}  // namespace htree::tree_attention
