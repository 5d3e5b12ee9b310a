// Kernels on states: merge, normalisation and reverse subtraction. docs/semantics/tree_attention.md §1.7.
#pragma once

#include "device/numeric.cuh"
#include "device/online_softmax.cuh"
#include "device/pack.cuh"
#include "host/cuda/kernel_launch.h"
#include "ops/sparse_attention/cuda/any/merge_params.h"
#include "ops/tree/cuda/any/geometry.h"
#include "ops/tree/cuda/any/lists.cuh"

namespace htree::tree_attention {

// exp(from - to), or 0 for an empty state, where from - to may be -inf - -inf.
__device__ __forceinline__ float rebase_factor(float from, float to, float sum) {
  return sum == 0.0f ? 0.0f : expf(from - to);
}

__device__ __forceinline__ int64_t state_offset(const int64_t (&strides)[3], const RowIndex& row) {
  return row.batch * strides[0] + row.query * strides[1] + row.list * strides[2];
}
__device__ __forceinline__ int64_t state_offset(const int64_t (&strides)[4], const RowIndex& row) {
  return row.batch * strides[0] + row.query * strides[1] + row.list * strides[2];
}

// 0 / 0 gives NaN, as torch.softmax does where every score is -inf.
template <typename T>
__global__ void __launch_bounds__(kElementThreads)
    final_normalize_kernel(const NormalizeParams<T> params, int64_t num_items) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kElementThreads;
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * kElementThreads + threadIdx.x; item < num_items;
       item += step) {
    const int64_t column = item % params.value_dim;
    const RowIndex row = row_index(item / params.value_dim, params.num_rows, params.num_heads);
    const float sum = params.state.sum[state_offset(params.state.sum_strides, row)];
    const float out =
        params.state.out[state_offset(params.state.out_strides, row) + column * params.state.out_strides[3]];
    params.out[item] = device::from_acc<T>(out / sum);
  }
}

struct SubtractTraits {
  static constexpr int kThreads = 128;
  static constexpr int kTile = kThreads;
};

// A block has one head of one row. It sums the listed nodes relative to their own maximum and takes them out
// of the state. Where only the residue of rounding would remain, it leaves the empty state: where the list is
// not full, or what remains is not above top_k * epsilon of the sum.
template <typename T>
__global__ void __launch_bounds__(SubtractTraits::kThreads)
    subtract_topk_kernel(const SubtractParams<T> params) {
  constexpr int kThreads = SubtractTraits::kThreads;
  constexpr int kWarps = kThreads / device::kWarpSize;
  constexpr float kEpsilon = 1.1920929e-7f;
  __shared__ float weights[SubtractTraits::kTile];
  __shared__ int32_t nodes[SubtractTraits::kTile];
  __shared__ float maxima[kWarps];
  __shared__ float sums[kWarps];
  const RowIndex row = row_index(blockIdx.x, params.num_rows, params.num_heads);
  const int32_t* indices = at_row(params.indices, row.batch, row.query, row.list);
  const float* scores = at_row(params.scores, row.batch, row.query, row.list);
  const T* values = at_row(params.values, row.batch, 0, row.list / params.heads_per_kv_head);
  const auto counts = [&](int64_t i) {
    return indices[i] >= 0 && indices[i] < params.num_nodes &&
           scores[i] != device::negative_infinity<float>();
  };

  float maximum = device::negative_infinity<float>();
  bool missing = false;
  for (int64_t i = threadIdx.x; i < params.top_k; i += kThreads) {
    maximum = counts(i) ? device::MaxNan{}(maximum, scores[i]) : maximum;
    missing |= indices[i] == -1;
  }
  maximum = device::block_reduce<kThreads, device::MaxNan>(maximum, maxima);
  float sum = 0.0f;
  for (int64_t i = threadIdx.x; i < params.top_k; i += kThreads) {
    sum += counts(i) ? expf(scores[i] - maximum) : 0.0f;
  }
  sum = device::block_reduce<kThreads, device::Sum>(sum, sums);
  const bool not_full = __syncthreads_or(missing);

  const float old_max = params.max[blockIdx.x];
  const float old_sum = params.sum[blockIdx.x];
  const float factor = rebase_factor(maximum, old_max, sum);
  const float rest = old_sum - sum * factor;
  const bool empty = not_full || rest <= static_cast<float>(params.top_k) * kEpsilon * old_sum;
  float* out = params.out + static_cast<int64_t>(blockIdx.x) * params.value_dim;
  for (int64_t first = 0; first < params.value_dim; first += kThreads) {
    const int64_t column = first + threadIdx.x;
    float listed = 0.0f;
    for (int64_t tile = 0; tile < params.top_k; tile += SubtractTraits::kTile) {
      const int64_t i = tile + threadIdx.x;
      const bool used = i < params.top_k && counts(i);
      __syncthreads();
      nodes[threadIdx.x] = used ? indices[i] : -1;
      weights[threadIdx.x] = used ? expf(scores[i] - maximum) : 0.0f;
      __syncthreads();
      for (int candidate = 0; candidate < SubtractTraits::kTile; ++candidate) {
        if (nodes[candidate] >= 0 && column < params.value_dim) {
          listed = fmaf(weights[candidate],
                        device::to_acc(values[nodes[candidate] * params.values.row + column]), listed);
        }
      }
    }
    if (column < params.value_dim) {
      out[column] = empty ? 0.0f : out[column] - listed * factor;
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    params.max[blockIdx.x] = empty ? device::negative_infinity<float>() : old_max;
    params.sum[blockIdx.x] = empty ? 0.0f : rest;
  }
}

template <typename T>
cudaError_t launch_final_normalize(const NormalizeParams<T>& params, cudaStream_t stream) {
  const int64_t items = params.num_batches * params.num_rows * params.num_heads * params.value_dim;
  if (items == 0) {
    return cudaSuccess;
  }
  return launch_kernel(final_normalize_kernel<T>, {.grid = blocks_for(items), .threads = kElementThreads},
                       stream, params, items);
}

template <typename T>
cudaError_t launch_subtract_topk(const SubtractParams<T>& params, cudaStream_t stream) {
  const int64_t states = params.num_batches * params.num_rows * params.num_heads;
  if (states == 0) {
    return cudaSuccess;
  }
  return launch_kernel(subtract_topk_kernel<T>,
                       {.grid = static_cast<unsigned>(states), .threads = SubtractTraits::kThreads}, stream,
                       params);
}

}  // namespace htree::tree_attention
