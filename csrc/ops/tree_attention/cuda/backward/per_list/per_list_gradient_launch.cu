// Launchers of block_gradient_launch.h: run-time shape to compiled instance. No torch.
#include "ops/tree_attention/cuda/backward/per_list/per_list_gradient.h"

#include "ops/tree_attention/cuda/backward/per_list/per_list_gradient_instances.cuh"
#include "ops/tree_attention/cuda/dispatch_shape.h"

namespace htree::tree_attention {

HTREE_EACH_TENSOR_CORE_SHAPE(HTREE_BLOCK_GRADIENT_INSTANCES)

void launch_block_gradient(const TensorCoreShape& shape, const BlockGradientParams& params,
                           cudaStream_t stream) {
  dispatch_shape(shape, [&](auto type, auto dim) {
    launch_block_gradient_instance<typename decltype(type)::type, decltype(dim)::value>(params, stream);
  });
}

void launch_partial_sums(const TensorCoreShape& shape, const PartialSumParams& params, cudaStream_t stream) {
  dispatch_shape(shape, [&](auto type, auto dim) {
    launch_partial_sums_instance<typename decltype(type)::type, decltype(dim)::value>(params, stream);
  });
}

}  // namespace htree::tree_attention
