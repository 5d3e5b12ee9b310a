// Launchers of top_launch.h: run-time shape to compiled instance, and the selection, which has none. No
// torch.
#include "ops/tree_attention/cuda/dispatch_shape.h"
#include "ops/tree_attention/cuda/forward/dense_top/dense_instances.cuh"

namespace htree::tree_attention {

HTREE_EACH_TENSOR_CORE_SHAPE(HTREE_TOP_INSTANCES)

void launch_top_relay(const TensorCoreShape& shape, const TopRelayParams& params, cudaStream_t stream) {
  dispatch_shape(shape, [&](auto type, auto dim) {
    launch_top_relay_instance<typename decltype(type)::type, decltype(dim)::value>(params, stream);
  });
}

void launch_top_references(const TensorCoreShape& shape, const TopReferenceParams& params,
                           cudaStream_t stream) {
  dispatch_shape(shape, [&](auto type, auto dim) {
    launch_top_references_instance<typename decltype(type)::type, decltype(dim)::value>(params, stream);
  });
}

void launch_top_importances(const TensorCoreShape& shape, const TopImportanceParams& params,
                            cudaStream_t stream) {
  dispatch_shape(shape, [&](auto type, auto dim) {
    launch_top_importances_instance<typename decltype(type)::type, decltype(dim)::value>(params, stream);
  });
}

void launch_top_attend(const TensorCoreShape& shape, const TopAttendParams& params, cudaStream_t stream) {
  dispatch_shape(shape, [&](auto type, auto dim) {
    launch_top_attend_instance<typename decltype(type)::type, decltype(dim)::value>(params, stream);
  });
}

}  // namespace htree::tree_attention
