// Run-time shape to compiled instance of union_instances.cuh. No torch.
#include "ops/tree_attention/cuda/forward/shared_gather/shared_gather_attend.h"

#include "ops/tree_attention/cuda/dispatch_shape.h"
#include "ops/tree_attention/cuda/forward/shared_gather/shared_gather_instances.cuh"

namespace htree::tree_attention {

HTREE_EACH_TENSOR_CORE_SHAPE(HTREE_UNION_INSTANCES)

void launch_union_attend(const TensorCoreShape& shape, const AttendParams& params, cudaStream_t stream) {
  dispatch_shape(shape, [&](auto tag, auto dim) {
    launch_union_instance<typename decltype(tag)::type, dim.value, dim.value>(params, stream);
  });
}

}  // namespace htree::tree_attention
