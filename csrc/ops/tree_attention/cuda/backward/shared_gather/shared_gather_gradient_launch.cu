// Run-time shape to compiled instance of union_gradient_instances.cuh. No torch.
#include "ops/tree_attention/cuda/backward/shared_gather/shared_gather_gradient.h"

#include "ops/tree_attention/cuda/dispatch_shape.h"
#include "ops/tree_attention/cuda/backward/shared_gather/shared_gather_gradient_instances.cuh"

namespace htree::tree_attention {

HTREE_EACH_TENSOR_CORE_SHAPE(HTREE_UNION_GRADIENT_INSTANCES)

void launch_union_gradient(const TensorCoreShape& shape, const UnionGradientParams& params,
                           cudaStream_t stream) {
  dispatch_shape(shape, [&](auto tag, auto dim) {
    launch_union_gradient_instance<typename decltype(tag)::type, dim.value>(params, stream);
  });
}

}  // namespace htree::tree_attention
