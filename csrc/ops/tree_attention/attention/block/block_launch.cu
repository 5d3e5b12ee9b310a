// Launchers of block_launch.h: run-time shape to compiled instance, and the table of turns. No torch.
#include "ops/tree_attention/attention/block/block_launch.h"

#include "ops/tree_attention/attention/block/block_instances.cuh"
#include "ops/tree_attention/attention/dispatch_shape.h"

namespace htree::tree_attention {

HTREE_BLOCK_INSTANCES(extern, __half, 32)
HTREE_BLOCK_INSTANCES(extern, __half, 64)
HTREE_BLOCK_INSTANCES(extern, __half, 128)
HTREE_BLOCK_INSTANCES(extern, __nv_bfloat16, 32)
HTREE_BLOCK_INSTANCES(extern, __nv_bfloat16, 64)
HTREE_BLOCK_INSTANCES(extern, __nv_bfloat16, 128)

namespace {

constexpr int kTurnThreads = 256;

// One thread per (slot, pair of dims).
__global__ void slot_turns_kernel(__half* table, int64_t slots, int half, double log_base, bool rotate) {
  const int64_t i = int64_t{blockIdx.x} * kTurnThreads + threadIdx.x;
  if (i >= slots * half) {
    return;
  }
  const int64_t slot = i / half, dim = i % half;
  const double position = static_cast<double>(slot * kBlockRows);
  const double angle = rotate ? position * exp(-log_base * static_cast<double>(dim) / half) : 0.0;
  __half* row = table + slot * 2 * half + dim;
  row[0] = __float2half_rn(static_cast<float>(cos(angle)));
  row[half] = __float2half_rn(static_cast<float>(sin(angle)));
}

__global__ void compiled_kernel() {}

}  // namespace

void launch_slot_turns(uint16_t* table, int64_t slots, int key_dim, double base, bool rotate,
                       cudaStream_t stream) {
  const int half = key_dim / 2;
  const int64_t blocks = (slots * half + kTurnThreads - 1) / kTurnThreads;
  slot_turns_kernel<<<static_cast<unsigned>(blocks), kTurnThreads, 0, stream>>>(
      reinterpret_cast<__half*>(table), slots, half, log(base), rotate);
}

void launch_block_attend(const TensorCoreShape& shape, const AttendParams& params, cudaStream_t stream) {
  dispatch_shape(shape, [&](auto type, auto dim) {
    launch_block_attend_instance<typename decltype(type)::type, decltype(dim)::value>(params, stream);
  });
}

bool block_kernels_compiled() {
  cudaFuncAttributes attributes;
  if (cudaFuncGetAttributes(&attributes, compiled_kernel) != cudaSuccess) {
    cudaGetLastError();  // no code for this device at all; the launch that follows says so
    return false;
  }
  // Code made from an older architecture's PTX runs on sm_90 too, but without the kernels' bodies.
  return attributes.binaryVersion == 90 && attributes.ptxVersion == 90;
}

}  // namespace htree::tree_attention
