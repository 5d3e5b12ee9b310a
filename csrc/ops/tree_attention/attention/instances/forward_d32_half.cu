#include "ops/tree_attention/cuda/forward/per_query/tensor_core_instances.cuh"

namespace htree::tree_attention {
HTREE_TREE_ATTENTION_INSTANCES(, __half, 32)
}  // namespace htree::tree_attention
