// Launchers of gradient_launch.h: run-time shape to compiled instance, and the kernels without one. No torch.
#include "ops/tree_attention/cuda/dispatch_shape.h"
#include "ops/tree_attention/cuda/backward/gradient_instances.cuh"

namespace htree::tree_attention {

HTREE_EACH_TENSOR_CORE_SHAPE(HTREE_TREE_GRADIENT_INSTANCES)

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

}  // namespace

void launch_gradient_rows(const TensorCoreShape& shape, const RowParams& params, cudaStream_t stream) {
  const dim3 grid(num_blocks(params.num_queries, kRowQueries), params.num_batches * params.num_kv_heads);
  dispatch_shape(shape, [&](auto tag, auto dim) {
    gradient_rows_kernel<typename decltype(tag)::type, dim.value>
        <<<grid, kRowWarps * 32, 0, stream>>>(params);
  });
}

void launch_key_bounds(const TensorCoreShape& shape, const RelayParams& relay, KeyBounds* bounds,
                       cudaStream_t stream) {
  const dim3 grid(num_blocks(relay.num_nodes, kBoundNodes),
                  static_cast<unsigned>(relay.num_batches * relay.num_kv_heads));
  dispatch_shape(shape, [&](auto tag, auto dim) {
    key_bounds_kernel<typename decltype(tag)::type, dim.value>
        <<<grid, kRowWarps * 32, 0, stream>>>(relay, bounds);
  });
}

void launch_query_gradient(const TensorCoreShape& shape, const QueryGradientParams& params,
                           cudaStream_t stream) {
  dispatch_shape(shape, [&](auto tag, auto dim) {
    launch_query_gradient_instance<typename decltype(tag)::type, dim.value, dim.value>(params, stream);
  });
}

void launch_key_gradient(const TensorCoreShape& shape, const KeyGradientParams& params, cudaStream_t stream) {
  dispatch_shape(shape, [&](auto tag, auto dim) {
    launch_key_gradient_instance<typename decltype(tag)::type, dim.value, dim.value>(params, stream);
  });
}

void launch_parent_gradient(const TensorCoreShape& shape, const KeyGradientParams& params,
                            cudaStream_t stream) {
  dispatch_shape(shape, [&](auto tag, auto dim) {
    launch_parent_gradient_instance<typename decltype(tag)::type, dim.value>(params, stream);
  });
}

void launch_position_turns(const float2* rope, __half2* turns, int64_t num_positions, int key_dim,
                           cudaStream_t stream) {
  const int half = key_dim / 2;
  position_turns_kernel<<<num_blocks(num_positions * (half / 2), kThreads), kThreads, 0, stream>>>(
      rope, turns, num_positions, half);
}

void launch_push_gradient(const PushParams& params, cudaStream_t stream) {
  push_gradient_kernel<<<num_blocks(params.heads * params.num_nodes * params.dim, kThreads), kThreads, 0,
                         stream>>>(params);
}

void launch_store_gradient(const PushParams& params, int64_t num_kv_heads, StoreType type, void* out,
                           cudaStream_t stream) {
  const unsigned grid = num_blocks(params.heads * params.num_nodes * params.dim, kThreads);
  switch (type) {
    case StoreType::kFloat:
      store_gradient_kernel<<<grid, kThreads, 0, stream>>>(params, num_kv_heads, static_cast<float*>(out));
      break;
    case StoreType::kHalf:
      store_gradient_kernel<<<grid, kThreads, 0, stream>>>(params, num_kv_heads, static_cast<__half*>(out));
      break;
    case StoreType::kBFloat16:
      store_gradient_kernel<<<grid, kThreads, 0, stream>>>(params, num_kv_heads,
                                                           static_cast<__nv_bfloat16*>(out));
      break;
  }
}

}  // namespace htree::tree_attention
