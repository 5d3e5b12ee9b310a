// Launchers of the union gather: run-time shape to compiled instance, and its table. No torch.
#include "ops/tree_attention/attention/dispatch_shape.h"
#include "ops/tree_attention/attention/turn_table.cuh"
#include "ops/tree_attention/attention/union_instances.cuh"

namespace htree::tree_attention {

HTREE_UNION_INSTANCE(extern, __half, 32)
HTREE_UNION_INSTANCE(extern, __half, 64)
HTREE_UNION_INSTANCE(extern, __half, 128)
HTREE_UNION_INSTANCE(extern, __nv_bfloat16, 32)
HTREE_UNION_INSTANCE(extern, __nv_bfloat16, 64)
HTREE_UNION_INSTANCE(extern, __nv_bfloat16, 128)

namespace {

// Has static shared memory where the bodies of the kernels are compiled in: sm_90a, not sm_90 or later PTX.
__global__ void hopper_probe_kernel() {
#if HTREE_SM90A
  __shared__ volatile int present;
  present = 1;
#endif
}

}  // namespace

void launch_turn_table(__half2* table, int64_t num_slots, int key_dim, double base, bool rotate,
                       cudaStream_t stream) {
  const int64_t pairs = num_slots * key_dim / 4;
  turn_table_kernel<<<static_cast<unsigned>((pairs + kTurnThreads - 1) / kTurnThreads), kTurnThreads, 0,
                      stream>>>(table, pairs, key_dim, log(base), rotate);
}

void launch_union_attend(const TensorCoreShape& shape, const AttendParams& params, cudaStream_t stream) {
  dispatch_shape(shape, [&](auto tag, auto dim) {
    launch_union_instance<typename decltype(tag)::type, dim.value, dim.value>(params, stream);
  });
}

bool union_kernels_compiled() {
  cudaFuncAttributes attributes;
  if (cudaFuncGetAttributes(&attributes, hopper_probe_kernel) != cudaSuccess) {
    cudaGetLastError();  // no code for this device at all; the launch that follows says so
    return false;
  }
  return attributes.sharedSizeBytes > 0;
}

}  // namespace htree::tree_attention
