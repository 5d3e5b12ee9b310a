#include "ops/tree_attention/cuda/backward/general/general_gradient_instances.cuh"

namespace htree::tree_attention {
HTREE_GENERAL_GRADIENT_INSTANCES(__half)
}  // namespace htree::tree_attention
