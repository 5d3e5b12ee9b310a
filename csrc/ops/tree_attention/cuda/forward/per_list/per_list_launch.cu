// Launchers of block_launch.h: run-time shape to compiled instance. No torch.
#include "ops/tree_attention/cuda/forward/per_list/per_list_attend.h"

#include "ops/tree_attention/cuda/forward/per_list/per_list_instances.cuh"
#include "ops/tree_attention/cuda/dispatch_shape.h"

namespace htree::tree_attention {

HTREE_EACH_TENSOR_CORE_SHAPE(HTREE_BLOCK_INSTANCES)

void launch_block_attend(const TensorCoreShape& shape, const AttendParams& params, cudaStream_t stream) {
  dispatch_shape(shape, [&](auto type, auto dim) {
    launch_block_attend_instance<typename decltype(type)::type, decltype(dim)::value>(params, stream);
  });
}

}  // namespace htree::tree_attention
