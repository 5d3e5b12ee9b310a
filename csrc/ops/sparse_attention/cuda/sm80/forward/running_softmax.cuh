// The running softmax of one (token, kv head) in the registers of a warp, and the state that a layer leaves
// to the next: docs/semantics/tree_attention.md §1.5.
#pragma once

#include "device/mma.cuh"
#include "device/numeric.cuh"
#include "device/reduce.cuh"
#include "ops/sparse_attention/cuda/attend.h"
#include "ops/sparse_attention/cuda/sm80/forward/output_factor.cuh"
#include "ops/tree/cuda/sm80/gather.cuh"
#include "ops/tree/cuda/sm80/running_state.cuh"

namespace htree::tree_attention {

// Sets the scores of the rows of a slot that do not take part to -inf. Bit i of `present` is row i.
template <int kTiles>
__device__ __forceinline__ void hide_rows(float (&s)[kTiles][4], unsigned present) {
  const int row = threadIdx.x % 32 / 4;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      s[tile][i] = present >> (row + i / 2 * 8) & 1 ? s[tile][i] : -INFINITY;
    }
  }
}

// The running softmax of a warp. A lane holds columns (query heads) 2 * (lane % 4) and the next of each tile,
// summed over its own rows alone. `reference` moves only when a score exceeds it by kSlack powers of two, so
// `out` is rarely rescaled; `largest` is the lane's true maximum.
template <int kValueDim, int kTiles>
struct RunningSoftmax {
  static constexpr float kSlack = 8.f;
  float reference[kTiles][2], largest[kTiles][2], sum[kTiles][2];
  float out[kTiles][kValueDim / 16][4];

  __device__ __forceinline__ RunningSoftmax() {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        reference[tile][i] = largest[tile][i] = -INFINITY;
        sum[tile][i] = 0.f;
      }
#pragma unroll
      for (int step = 0; step < kValueDim / 16; ++step) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          out[tile][step][i] = 0.f;
        }
      }
    }
  }

  // Maximum of a column over the lanes that hold it.
  __device__ __forceinline__ static float column_max(float x) {
#pragma unroll
    for (int offset = 4; offset < 32; offset *= 2) {
      x = fmaxf(x, __shfl_xor_sync(device::kFullMask, x, offset));
    }
    return x;
  }

  __device__ __forceinline__ void rescale(int tile, int i, float factor) {
    sum[tile][i] *= factor;
#pragma unroll
    for (int step = 0; step < kValueDim / 16; ++step) {
      out[tile][step][i] *= factor;
      out[tile][step][i + 2] *= factor;
    }
  }

  // Replaces scores by weights 2^(s - reference); -inf marks what does not take part.
  __device__ __forceinline__ void weigh(float (&s)[kTiles][4]) {
    bool grows = false;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float top = fmaxf(s[tile][i], s[tile][i + 2]);
        largest[tile][i] = fmaxf(largest[tile][i], top);
        // Rounded down: where floats lie 16 apart, rounding up would leave a weight of 2^16, beyond fp16.
        grows |= top > __fadd_rd(reference[tile][i], kSlack);
      }
    }
    if (__any_sync(device::kFullMask, grows)) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float next = column_max(largest[tile][i]);
          rescale(tile, i,
                  reference[tile][i] == -INFINITY ? 0.f : device::exp2_flushed(reference[tile][i] - next));
          reference[tile][i] = next;
        }
      }
    }
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float from = reference[tile][i & 1];
        s[tile][i] = device::exp2_flushed(s[tile][i] - (from == -INFINITY ? 0.f : from));
        sum[tile][i & 1] += s[tile][i];
      }
    }
  }

  // Gives every lane the state of its columns, relative to their true maxima.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int offset = 4; offset < 32; offset *= 2) {
          sum[tile][i] += __shfl_xor_sync(device::kFullMask, sum[tile][i], offset);
        }
        largest[tile][i] = column_max(largest[tile][i]);
        if (largest[tile][i] != -INFINITY) {
          rescale(tile, i, device::exp2_flushed(reference[tile][i] - largest[tile][i]));
        }
      }
    }
  }
};

// Merges the warp's state into the running one and writes that state or, at the last layer, the output.
template <typename T, int kValueDim, int kTiles>
__device__ __forceinline__ void write_state(const AttendParams& params, const GatherTask& task, int64_t query,
                                            RunningSoftmax<kValueDim, kTiles>& state) {
  const GatherParams& p = params.gather;
  const int lane = threadIdx.x % 32;
  const int64_t num_heads = int64_t{p.num_kv_heads} * p.group;
  const int64_t first_head = int64_t{task.kv_head} * p.group;
  const int64_t state_row = task.batch * params.state_batch + query * num_heads + first_head;
  const int64_t partial_row = (task.batch * int64_t{p.num_queries} + query) * num_heads + first_head;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int column = tile * 8 + lane % 4 * 2 + i;
      const bool exists = column < p.group;
      float own = 1.f, before = 0.f;
      float max = state.largest[tile][i], sum = state.sum[tile][i];
      if (exists && !params.first) {
        merge_states(max, sum, params.max[state_row + column], params.sum[state_row + column], own, before);
      }
      __syncwarp();  // all lanes of a column have read the state that one of them replaces
      if (exists && lane / 4 == 0) {
        params.max[state_row + column] = params.last ? max * kLn2 : max;
        params.sum[state_row + column] = sum;
      }
      const float inverse = exists ? output_factor(params, first_head + column, max, sum) : 0.f;
      float* partial = params.partial + (partial_row + column) * kValueDim;
      T* out = static_cast<T*>(params.out) + (state_row + column) * kValueDim;
#pragma unroll
      for (int step = 0; step < kValueDim / 16; ++step) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int dim = step * 16 + half * 8 + lane / 4;
          float value = state.out[tile][step][i + 2 * half];
          if (exists && !params.first) {
            value = value * own + partial[dim] * before;
          }
          if (exists && params.last) {
            out[dim] = device::from_acc<T>(value * inverse);
          } else if (exists) {
            partial[dim] = value;
          }
        }
      }
    }
  }
}

}  // namespace htree::tree_attention
