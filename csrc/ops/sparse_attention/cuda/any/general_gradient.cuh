// Gradients for every dtype and shape. One warp owns a row of dQ (query, head) or a row of dK and dV (node,
// kv head). Its lanes share the dims and its sums lie in shared memory, so any width will do. A score depends
// only on the rotation of the candidate relative to the query, R_{n-1-p}; one of the two is rotated by that,
// the other not at all (docs/semantics/tree_attention.md §1.4).
#pragma once

#include "device/numeric.cuh"
#include "device/reduce.cuh"
#include "host/cuda/kernel_launch.h"
#include "ops/sparse_attention/cuda/any/general_gradient.h"
#include "ops/tree/cuda/sm80/gather.cuh"
#include "ops/tree/tree_args.h"

namespace htree::tree_attention {

constexpr int kGeneralWarps = 4;

template <typename T>
__device__ __forceinline__ const T* view_row(const TensorView& view, int64_t batch, int64_t row,
                                             int64_t head) {
  return static_cast<const T*>(view.data) + batch * view.batch + row * view.row + head * view.head;
}

// Dot product of `count` elements over the lanes of a warp; every lane gets it.
template <typename T>
__device__ __forceinline__ float warp_dot(const T* x, const float* y, int count) {
  float sum = 0.f;
  for (int i = threadIdx.x % 32; i < count; i += 32) {
    sum += device::to_acc(x[i]) * y[i];
  }
  return device::warp_reduce<device::Sum>(sum);
}

// The softmax weight of a score, where max and sum are those of the whole cut.
__device__ __forceinline__ float cut_weight(float score, float max, float sum) {
  return expf(score - max) / sum;
}

// Offset of a query head's row in max and sum.
__device__ __forceinline__ int64_t state_row(const GeneralGradientParams& p, int64_t batch, int64_t query,
                                             int64_t head) {
  return batch * p.states.batch + query * p.heads.num_kv_heads * p.heads.group + head;
}

__device__ __forceinline__ int64_t chunk_row(const GeneralGradientParams& p, int64_t batch, int64_t query,
                                             int64_t head) {
  return (batch * p.num_queries + query) * p.heads.num_kv_heads * p.heads.group + head;
}

template <typename T>
__global__ void __launch_bounds__(kGeneralWarps * 32) general_delta_kernel(GeneralGradientParams p) {
  const int64_t num_heads = int64_t{p.heads.num_kv_heads} * p.heads.group;
  const int64_t row = int64_t{blockIdx.x} * kGeneralWarps + threadIdx.x / 32;
  if (row >= p.num_batches * int64_t{p.num_queries} * num_heads) {
    return;
  }
  const int64_t head = row % num_heads, query = row / num_heads % p.num_queries,
                batch = row / num_heads / p.num_queries;
  const T* gradient = view_row<T>(p.gradients, batch, query, head);
  const T* output = view_row<T>(p.outputs, batch, query, head);
  float sum = 0.f;
  for (int i = threadIdx.x % 32; i < p.heads.value_dim; i += 32) {
    sum += device::to_acc(gradient[i]) * device::to_acc(output[i]);
  }
  sum = device::warp_reduce<device::Sum>(sum);
  if (threadIdx.x % 32 == 0) {
    p.delta[row] = row_delta(p.states, state_row(p, batch, query, head), sum);
  }
}

// Shared memory per warp: the query [K], dO [V] and the sum [K] in fp32.
template <typename T>
__global__ void __launch_bounds__(kGeneralWarps * 32)
    general_query_gradient_kernel(GeneralGradientParams p, GeneralQueryGradient out) {
  extern __shared__ float general_shared[];
  const int lane = threadIdx.x % 32;
  const int64_t num_heads = int64_t{p.heads.num_kv_heads} * p.heads.group;
  const int64_t row = int64_t{blockIdx.x} * kGeneralWarps + threadIdx.x / 32;
  if (row >= p.num_batches * int64_t{p.num_queries} * num_heads) {
    return;
  }
  const int64_t head = row % num_heads, query = row / num_heads % p.num_queries,
                batch = row / num_heads / p.num_queries;
  const int64_t kv_head = head / p.heads.group;
  float* q = general_shared + threadIdx.x / 32 * (2 * p.heads.key_dim + p.heads.value_dim);
  float* gradient = q + p.heads.key_dim;
  float* sum = gradient + p.heads.value_dim;
  const T* q_row = view_row<T>(p.queries, batch, query, head);
  const T* gradient_row = view_row<T>(p.gradients, batch, query, head);
  for (int i = lane; i < p.heads.key_dim; i += 32) {
    q[i] = device::to_acc(q_row[i]) * p.scale;
    sum[i] = 0.f;
  }
  for (int i = lane; i < p.heads.value_dim; i += 32) {
    gradient[i] = device::to_acc(gradient_row[i]);
  }
  __syncwarp();

  const int64_t list_idx = query / p.lists.stride * p.heads.num_kv_heads + kv_head;
  const int32_t* list = p.lists.data + batch * p.lists.batch + list_idx * p.lists.width;
  const int32_t* next =
      p.lists.next ? p.lists.next + batch * p.lists.next_batch + list_idx * p.lists.next_width : nullptr;
  const int64_t rightmost = (p.t0 + query) / p.layer.node_span;
  const int64_t n = candidate_count(count_entries(list, p.lists.width), rightmost, p.layer.rate);
  const int half = p.heads.key_dim / 2;
  const int64_t state = state_row(p, batch, query, head);
  const float max = p.states.max[state], total = p.states.sum[state];
  const float delta = p.delta[row];
  int refined = 0;  // entries of `next` that are passed: both lists ascend
  for (int64_t c = next && n <= p.lists.next_width ? n : 0; c < n; ++c) {
    const int64_t node = list[c / p.layer.rate] * p.layer.rate + c % p.layer.rate;
    if (next) {
      while (refined < p.lists.next_width && next[refined] >= 0 && next[refined] < node) {
        ++refined;
      }
      if (refined < p.lists.next_width && next[refined] == node) {
        continue;
      }
    }
    if (!node_present(node, rightmost, p.layer.num_nodes)) {
      continue;
    }
    const T* key = view_row<T>(p.layer.keys, batch, node, kv_head);
    const float2* rotations = p.rope + (n - 1 - c) * half;
    float score = 0.f;
    for (int i = lane; i < half; i += 32) {
      const float low = device::to_acc(key[i]), high = device::to_acc(key[half + i]);
      const float2 rotation = rotations[i];
      score += q[i] * (low * rotation.x + high * rotation.y) +
               q[half + i] * (high * rotation.x - low * rotation.y);
    }
    score = device::warp_reduce<device::Sum>(score);
    const float ds =
        cut_weight(score, max, total) *
        (warp_dot(view_row<T>(p.layer.values, batch, node, kv_head), gradient, p.heads.value_dim) - delta) *
        p.scale;
    for (int i = lane; i < half; i += 32) {
      const float low = device::to_acc(key[i]), high = device::to_acc(key[half + i]);
      const float2 rotation = rotations[i];
      sum[i] += ds * (low * rotation.x + high * rotation.y);
      sum[half + i] += ds * (high * rotation.x - low * rotation.y);
    }
  }
  __syncwarp();  // the lane that added to sum[K/2 + i] need not be the one that stores it
  float* partial = out.partial + row * p.heads.key_dim;
  T* result = static_cast<T*>(out.gradient) + batch * out.gradient_batch +
              (query * num_heads + head) * p.heads.key_dim;
  for (int i = lane; i < p.heads.key_dim; i += 32) {
    const float value = out.first ? sum[i] : sum[i] + partial[i];
    if (out.last) {
      result[i] = device::from_acc<T>(value);
    } else {
      partial[i] = value;
    }
  }
}

// Whether the ascending list holds `node`.
__device__ __forceinline__ bool list_holds(const int32_t* list, int width, int64_t node) {
  int low = 0, high = width;
  while (low < high) {
    const int middle = (low + high) / 2;
    const int32_t at = list[middle];
    if (at < 0 || at > node) {
      high = middle;
    } else if (at == node) {
      return true;
    } else {
      low = middle + 1;
    }
  }
  return false;
}

// Grid: runs of kGeneralWarps rows (batch, kv head, node), the node fastest. Shared memory per warp, in fp32:
// the key [K], the value [V] and their two sums.
template <typename T>
__global__ void __launch_bounds__(kGeneralWarps * 32)
    general_key_gradient_kernel(GeneralGradientParams p, GeneralKeyGradient out) {
  extern __shared__ float general_shared[];
  const int lane = threadIdx.x % 32;
  const int64_t rows_per_head = out.num_parents * p.layer.rate;
  const int64_t row = int64_t{blockIdx.x} * kGeneralWarps + threadIdx.x / 32;
  if (row >= int64_t{p.num_batches} * p.heads.num_kv_heads * rows_per_head) {
    return;
  }
  const int64_t node = row % rows_per_head, head_idx = row / rows_per_head;
  const int64_t kv_head = head_idx % p.heads.num_kv_heads, batch = head_idx / p.heads.num_kv_heads;
  float* key = general_shared + threadIdx.x / 32 * 2 * (p.heads.key_dim + p.heads.value_dim);
  float* value = key + p.heads.key_dim;
  float* key_sum = value + p.heads.value_dim;
  float* value_sum = key_sum + p.heads.key_dim;
  const bool exists = node < p.layer.num_nodes;
  for (int i = lane; i < p.heads.key_dim; i += 32) {
    key[i] = exists ? device::to_acc(view_row<T>(p.layer.keys, batch, node, kv_head)[i]) : 0.f;
    key_sum[i] = 0.f;
  }
  for (int i = lane; i < p.heads.value_dim; i += 32) {
    value[i] = exists ? device::to_acc(view_row<T>(p.layer.values, batch, node, kv_head)[i]) : 0.f;
    value_sum[i] = 0.f;
  }
  __syncwarp();

  const int half = p.heads.key_dim / 2;
  const uint32_t* offset = out.offsets + head_idx * (out.num_parents + 1) + node / p.layer.rate;
  const uint32_t end = exists ? offset[1] : offset[0];
  for (uint32_t at = offset[0]; at < end; ++at) {
    const int64_t list_row = out.entries[at] / p.lists.width, slot = out.entries[at] % p.lists.width;
    const int64_t in_chunk = list_row * p.heads.num_kv_heads + kv_head;
    const int64_t count = out.counts[batch * int64_t{p.lists.num_lists} * p.heads.num_kv_heads + in_chunk];
    const int64_t c = slot * p.layer.rate + node % p.layer.rate;
    if (p.lists.next && list_holds(p.lists.next + batch * p.lists.next_batch + in_chunk * p.lists.next_width,
                                   p.lists.next_width, node)) {
      continue;
    }
    const int64_t last_query = min(list_row * p.lists.stride + p.lists.stride, int64_t{p.num_queries});
    for (int64_t query = list_row * p.lists.stride; query < last_query; ++query) {
      const int64_t rightmost = (p.t0 + query) / p.layer.node_span;
      const int64_t n = candidate_count(count, rightmost, p.layer.rate);
      if (c >= n || !node_present(node, rightmost, p.layer.num_nodes)) {
        continue;
      }
      const float2* rotations = p.rope + (n - 1 - c) * half;
      for (int g = 0; g < p.heads.group; ++g) {
        const int64_t head = kv_head * p.heads.group + g;
        const T* q = view_row<T>(p.queries, batch, query, head);
        const T* gradient = view_row<T>(p.gradients, batch, query, head);
        float score = 0.f;
        for (int i = lane; i < half; i += 32) {
          const float low = device::to_acc(q[i]), high = device::to_acc(q[half + i]);
          const float2 rotation = rotations[i];
          score += key[i] * (low * rotation.x - high * rotation.y) +
                   key[half + i] * (low * rotation.y + high * rotation.x);
        }
        score = device::warp_reduce<device::Sum>(score) * p.scale;
        const int64_t state = state_row(p, batch, query, head);
        const float weight = cut_weight(score, p.states.max[state], p.states.sum[state]);
        if (out.values) {
          for (int i = lane; i < p.heads.value_dim; i += 32) {
            value_sum[i] += weight * device::to_acc(gradient[i]);
          }
        }
        if (out.keys) {
          const float ds =
              weight *
              (warp_dot(gradient, value, p.heads.value_dim) - p.delta[chunk_row(p, batch, query, head)]) *
              p.scale;
          for (int i = lane; i < half; i += 32) {
            const float low = device::to_acc(q[i]), high = device::to_acc(q[half + i]);
            const float2 rotation = rotations[i];
            key_sum[i] += ds * (low * rotation.x - high * rotation.y);
            key_sum[half + i] += ds * (low * rotation.y + high * rotation.x);
          }
        }
      }
    }
  }
  __syncwarp();  // the lane that added to key_sum[K/2 + i] need not be the one that stores it
  const auto write = [&](float* to, const float* sum, int dim) {
    for (int i = lane; to && i < dim; i += 32) {
      float* element = to + row * dim + i;
      *element = out.add ? *element + sum[i] : sum[i];
    }
  };
  write(out.keys, key_sum, p.heads.key_dim);
  write(out.values, value_sum, p.heads.value_dim);
}

inline LaunchShape general_launch(int64_t rows, int64_t shared_bytes) {
  return {.grid = static_cast<unsigned>(ceil_div(rows, kGeneralWarps)),
          .threads = kGeneralWarps * 32,
          .shared_bytes = shared_bytes};
}

template <typename T>
cudaError_t launch_general_delta(const GeneralGradientParams& params, cudaStream_t stream) {
  const int64_t rows =
      int64_t{params.num_batches} * params.num_queries * params.heads.num_kv_heads * params.heads.group;
  return launch_kernel(general_delta_kernel<T>, general_launch(rows, 0), stream, params);
}

template <typename T>
cudaError_t launch_general_query_gradient(const GeneralGradientParams& params,
                                          const GeneralQueryGradient& query, cudaStream_t stream) {
  const int64_t rows =
      int64_t{params.num_batches} * params.num_queries * params.heads.num_kv_heads * params.heads.group;
  const int64_t bytes = int64_t{kGeneralWarps} * (2 * params.heads.key_dim + params.heads.value_dim) * 4;
  return launch_kernel(general_query_gradient_kernel<T>, general_launch(rows, bytes), stream, params, query);
}

template <typename T>
cudaError_t launch_general_key_gradient(const GeneralGradientParams& params, const GeneralKeyGradient& key,
                                        cudaStream_t stream) {
  const int64_t rows =
      int64_t{params.num_batches} * params.heads.num_kv_heads * key.num_parents * params.layer.rate;
  const int64_t bytes = int64_t{kGeneralWarps} * 2 * (params.heads.key_dim + params.heads.value_dim) * 4;
  return launch_kernel(general_key_gradient_kernel<T>, general_launch(rows, bytes), stream, params, key);
}

}  // namespace htree::tree_attention
