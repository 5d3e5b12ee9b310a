// Launchers of push_gradient.h and their kernels. No torch.
#include "ops/tree/cuda/any/push_gradient.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "device/numeric.cuh"
#include "device/sizes.h"
#include "host/cuda/kernel_launch.h"

namespace htree::tree_attention {

namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ float pushed(const PushParams& p, int64_t head, int64_t node, int64_t dim) {
  const float own = p.child[(head * p.child_rows + node) * p.dim + dim];
  if (!p.parent) {
    return own;
  }
  const int64_t parent = node / p.rate;
  const int64_t children = min(p.rate, p.num_nodes - parent * p.rate);
  return own + p.parent[(head * p.parent_rows + parent) * p.dim + dim] / static_cast<float>(children);
}

__global__ void __launch_bounds__(kThreads) push_gradient_kernel(PushParams p) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= p.heads * p.num_nodes * p.dim) {
    return;
  }
  const int64_t dim = i % p.dim, node = i / p.dim % p.num_nodes, head = i / p.dim / p.num_nodes;
  p.child[(head * p.child_rows + node) * p.dim + dim] = pushed(p, head, node, dim);
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    store_gradient_kernel(PushParams p, int64_t num_kv_heads, T* out) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= p.heads * p.num_nodes * p.dim) {
    return;
  }
  const int64_t dim = i % p.dim, kv_head = i / p.dim % num_kv_heads;
  const int64_t node = i / p.dim / num_kv_heads % p.num_nodes, batch = i / p.dim / num_kv_heads / p.num_nodes;
  out[i] = device::from_acc<T>(pushed(p, batch * num_kv_heads + kv_head, node, dim));
}

LaunchShape push_shape(const PushParams& params) {
  return {.grid = static_cast<unsigned>(ceil_div(params.heads * params.num_nodes * params.dim, kThreads)),
          .threads = kThreads};
}

}  // namespace

cudaError_t launch_push_gradient(const PushParams& params, cudaStream_t stream) {
  return launch_kernel(push_gradient_kernel, push_shape(params), stream, params);
}

cudaError_t launch_store_gradient(const PushParams& params, int64_t num_kv_heads, StoreType type, void* out,
                                  cudaStream_t stream) {
  const auto store = [&](auto* typed) {
    using T = std::remove_pointer_t<decltype(typed)>;
    return launch_kernel(store_gradient_kernel<T>, push_shape(params), stream, params, num_kv_heads, typed);
  };
  switch (type) {
    case StoreType::kFloat:
      return store(static_cast<float*>(out));
    case StoreType::kHalf:
      return store(static_cast<__half*>(out));
    case StoreType::kBFloat16:
      return store(static_cast<__nv_bfloat16*>(out));
  }
  return cudaErrorInvalidValue;
}

}  // namespace htree::tree_attention
