// Launchers of gradient_rows.h. No torch.
#include "ops/tree_attention/cuda/backward/gradient_rows.cuh"
#include "ops/tree_attention/cuda/dispatch_shape.h"

#include "host/cuda/kernel_launch.h"

namespace htree::tree_attention {

cudaError_t launch_gradient_rows(const TensorCoreShape& shape, const RowParams& params, cudaStream_t stream) {
  const dim3 grid(num_blocks(params.num_queries, kRowQueries), params.num_batches * params.num_kv_heads);
  return dispatch_shape(shape, [&](auto type, auto dim) {
    return launch_kernel(gradient_rows_kernel<typename decltype(type)::type, dim.value>,
                         {.grid = grid, .threads = kRowWarps * 32}, stream, params);
  });
}

cudaError_t launch_key_bounds(const TensorCoreShape& shape, const PackParams& pack, KeyBounds* bounds,
                              cudaStream_t stream) {
  const dim3 grid(num_blocks(pack.num_nodes, kBoundNodes),
                  static_cast<unsigned>(pack.num_batches * pack.num_kv_heads));
  return dispatch_shape(shape, [&](auto type, auto dim) {
    return launch_kernel(key_bounds_kernel<typename decltype(type)::type, dim.value>,
                         {.grid = grid, .threads = kRowWarps * 32}, stream, pack, bounds);
  });
}

}  // namespace htree::tree_attention
