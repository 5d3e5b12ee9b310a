// Records and numbers of the query heads of a chunk, and the magnitudes that keep their gradients in fp16's
// range.
#pragma once

#include "device/mma.cuh"
#include "device/numeric.cuh"
#include "device/reduce.cuh"
#include "ops/tree_attention/attention/gradient_launch.h"
#include "ops/tree_attention/attention/parent_block.cuh"

namespace htree::tree_attention {

constexpr int kRowWarps = 8;

__device__ __forceinline__ float finite_root(float sum_of_squares) {
  return finite_magnitude(sqrtf(sum_of_squares));
}

// One warp per (batch, query, head).
template <typename T>
__global__ void __launch_bounds__(kRowWarps * 32)
    gradient_rows_kernel(RowParams p, int key_dim, int value_dim) {
  const int lane = threadIdx.x % 32;
  const int64_t num_heads = int64_t{p.num_kv_heads} * p.group;
  const int64_t row_idx = int64_t{blockIdx.x} * kRowWarps + threadIdx.x / 32;
  if (row_idx >= p.num_batches * int64_t{p.num_queries} * num_heads) {
    return;
  }
  const int64_t head = row_idx % num_heads;
  const int64_t query = row_idx / num_heads % p.num_queries;
  const int64_t batch = row_idx / num_heads / p.num_queries;
  const int64_t head_idx = batch * p.num_kv_heads + head / p.group;
  const int64_t record_idx = (head_idx * p.num_queries + query) * p.group + head % p.group;
  T* record = p.records ? reinterpret_cast<T*>(p.records + record_idx * 2 * (key_dim + value_dim)) : nullptr;
  const auto row_of = [&](const TensorView& view) {
    return static_cast<const T*>(view.data) + batch * view.batch + query * view.row + head * view.head;
  };

  const T* q = row_of(p.queries);
  float largest = 0.f;
  for (int i = lane; i < key_dim; i += 32) {
    largest = fmaxf(largest, finite_magnitude(device::to_acc(q[i])));
  }
  largest = device::warp_reduce<device::Max>(largest);
  const PowerOfTwo power = half_range_scale(largest);
  for (int i = lane; i < key_dim && record; i += 32) {
    reinterpret_cast<__half*>(record)[i] = __float2half_rn(device::to_acc(q[i]) * power.scale);
  }

  const T* gradient = row_of(p.gradients);
  const T* output = row_of(p.outputs);
  float delta = 0.f, squares = 0.f;
  for (int i = lane; i < value_dim; i += 32) {
    const float g = device::to_acc(gradient[i]);
    delta += g * device::to_acc(output[i]);
    squares += g * g;
    if (record) {
      record[key_dim + i] = gradient[i];
    }
  }
  delta = device::warp_reduce<device::Sum>(delta);
  const float norm = finite_root(device::warp_reduce<device::Sum>(squares));
  if (lane == 0) {
    const int64_t state = batch * p.state_batch + query * num_heads + head;
    p.meta[record_idx] = {p.max[state] * 1.442695040888963f + log2f(p.sum[state]), delta, power.inverse,
                          norm};
    // maxima of non-negative floats: the order of arrival does not matter
    atomicMax(&p.bounds[head_idx].gradient_norm, __float_as_uint(norm));
    if (largest > 0.f) {
      atomicMax(&p.bounds[head_idx].query_unscale, __float_as_uint(power.inverse));
    }
  }
}

// One warp per (batch, token, kv head).
template <typename T>
__global__ void __launch_bounds__(kRowWarps * 32)
    key_bounds_kernel(RelayParams p, int key_dim, int value_dim, KeyBounds* bounds) {
  const int lane = threadIdx.x % 32;
  const int64_t row_idx = int64_t{blockIdx.x} * kRowWarps + threadIdx.x / 32;
  if (row_idx >= p.num_batches * p.num_nodes * p.num_kv_heads) {
    return;
  }
  const int64_t head = row_idx % p.num_kv_heads;
  const int64_t node = row_idx / p.num_kv_heads % p.num_nodes;
  const int64_t batch = row_idx / p.num_kv_heads / p.num_nodes;
  const auto row_of = [&](const TensorView& view) {
    return static_cast<const T*>(view.data) + batch * view.batch + node * view.row + head * view.head;
  };
  const T* key = row_of(p.keys);
  float largest = 0.f;
  for (int i = lane; i < key_dim; i += 32) {
    largest = fmaxf(largest, finite_magnitude(device::to_acc(key[i])));
  }
  largest = device::warp_reduce<device::Max>(largest);
  const T* value = row_of(p.values);
  float squares = 0.f;
  for (int i = lane; i < value_dim; i += 32) {
    const float x = device::to_acc(value[i]);
    squares += x * x;
  }
  const float norm = finite_root(device::warp_reduce<device::Sum>(squares));
  if (lane == 0) {
    KeyBounds& bound = bounds[batch * p.num_kv_heads + head];
    atomicMax(&bound.value_norm, __float_as_uint(norm));
    if (largest > 0.f) {
      atomicMax(&bound.key_unscale, __float_as_uint(key_row_scale(largest).inverse));
    }
  }
}

// The power of two that keeps |dS| * unscale below 2^15, where |dS| <= 2 |dO| |V|, for the fp16 operand of a
// product.
__device__ __forceinline__ PowerOfTwo score_gradient_scale(float gradient_norm, float value_norm,
                                                           float unscale) {
  const auto above = [](float x) { return static_cast<int>(__float_as_uint(x) >> 23 & 0xff) - 126; };
  const int bound = 1 + above(gradient_norm) + above(value_norm) + above(unscale);
  const int shift = min(max(15 - bound, -126), 126);
  return {__uint_as_float(static_cast<uint32_t>(127 + shift) << 23),
          __uint_as_float(static_cast<uint32_t>(127 - shift) << 23)};
}

}  // namespace htree::tree_attention
