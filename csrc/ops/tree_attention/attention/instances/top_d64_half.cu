#include "ops/tree_attention/cuda/forward/dense_top/dense_instances.cuh"

namespace htree::tree_attention {
HTREE_TOP_INSTANCES(, __half, 64)
}  // namespace htree::tree_attention
