#include "ops/tree_attention/attention/general_gradient_instances.cuh"

namespace htree::tree_attention {
HTREE_GENERAL_GRADIENT_INSTANCES(__half)
}  // namespace htree::tree_attention
