// Gradients of scores and what they give to index queries and index keys. Every sum has one owner and a fixed order.
#pragma once

#include "device/numeric.cuh"
#include "device/reduce.cuh"
#include "host/cuda/kernel_launch.h"
#include "ops/index_loss/cuda/any/held_blocks.cuh"

namespace htree::index_loss {

struct GradientTraits {
  static constexpr int kThreads = 256;
  static constexpr int kWarps = kThreads / device::kWarpSize;
  static constexpr int kMostWidth = 128;                            // d
  static constexpr int kChannels = kMostWidth / device::kWarpSize;  // of a lane
  static constexpr int kWarpTokens = 16;                            // whose gradients a warp adds up
  static constexpr int kTokens = kWarps * kWarpTokens;
};

// The gradient of a lane's block, which it writes where the block has its maximum. Blocks of earlier ranges, which only
// their keys still need, give nothing to the query.
struct ScoreGradient {
  float value;
  int32_t token;  // in the document
  bool counts;
};

template <typename T>
__device__ __forceinline__ ScoreGradient score_gradient(const GradientParams<T>& params, const HeldRow& row,
                                                        const BlockRange& blocks, int32_t block,
                                                        int32_t before, float factor, float index_lse) {
  const LossSpan& span = params.span;
  const int32_t column = blocks.column + block * blocks.units;
  const HeldBlock held = held_block(span, params.held, row, column, blocks.units);
  const float value = factor * (expf(held.score - index_lse) - held.mass);
  float* of_scores = const_cast<float*>(row.masses);  // of the first part: no other thread reads this block
  for (int32_t unit = 0; unit < blocks.units; ++unit) {
    of_scores[column + unit] = column + unit == held.column ? value : 0.0f;
  }
  const int32_t token = (held.column - blocks.column) * span.unit + row.places[held.column];
  return {value, token, block >= before};
}

// Grid: x = rows of all batches of the launch, y = index heads. A warp takes 32 blocks at a time, whose gradients its lanes
// compute side by side; then its lanes are channels.
template <typename T>
__global__ void __launch_bounds__(GradientTraits::kThreads)
    row_gradients_kernel(const GradientParams<T> params) {
  using Tr = GradientTraits;
  __shared__ float of_warps[Tr::kWarps][Tr::kMostWidth];
  const LossSpan& span = params.span;
  const int64_t held_index = blockIdx.x,
                index = static_cast<int64_t>(span.first_batch) * span.rows + held_index;
  const int32_t head = static_cast<int32_t>(blockIdx.y);
  const int warp = static_cast<int>(threadIdx.x) / device::kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % device::kWarpSize;
  const LossRow row = span.table[index];
  float sums[Tr::kChannels] = {};
  if (row.units > 0) {
    const int64_t batch = index / span.rows, at = index * params.held.index_heads + head;
    const HeldRow columns = held_row(span, params.held, held_index, head);
    const BlockRange blocks = held_blocks(span, row);
    const int32_t before = params.held.first_block - row.start / span.block_size;
    const float factor = *params.dloss / (static_cast<float>(*params.counted) * params.held.index_heads);
    const float index_lse = params.index_lse[at];
    const T* keys =
        params.key.data + batch * params.key.batch + row.start * params.key.row + head * params.key.head;
    for (int32_t first = blocks.first + warp * device::kWarpSize; first < blocks.last;
         first += Tr::kThreads) {
      ScoreGradient mine = {0.0f, 0, false};
      if (first + lane < blocks.last) {
        mine = score_gradient(params, columns, blocks, first + lane, before, factor, index_lse);
      }
      const unsigned counting = __ballot_sync(device::kFullMask, mine.counts);
      if (counting == 0) {
        continue;
      }
      // Without a branch eight keys are loaded at once: what does not count adds 0 times a key that counts.
      const int32_t known = __shfl_sync(device::kFullMask, mine.token, __ffs(static_cast<int>(counting)) - 1);
      if (!mine.counts) {
        mine.value = 0.0f;
        mine.token = known;
      }
#pragma unroll 8
      for (int i = 0; i < device::kWarpSize; ++i) {
        const float value = __shfl_sync(device::kFullMask, mine.value, i);
        const T* key = keys + __shfl_sync(device::kFullMask, mine.token, i) * params.key.row;
#pragma unroll
        for (int c = 0; c < Tr::kChannels; ++c) {
          const int channel = lane + c * device::kWarpSize;
          if (channel < params.d) {
            sums[c] = fmaf(value, device::to_acc(key[channel]), sums[c]);
          }
        }
      }
    }
  }
#pragma unroll
  for (int c = 0; c < Tr::kChannels; ++c) {
    of_warps[warp][lane + c * device::kWarpSize] = sums[c];
  }
  __syncthreads();
  const int channel = static_cast<int>(threadIdx.x);
  if (channel < params.d) {
    float* sum = params.row_sums + (index * params.held.index_heads + head) * params.d + channel;
    float all = params.held.is_first ? 0.0f : *sum;
    for (int w = 0; w < Tr::kWarps; ++w) {
      all += of_warps[w][channel];
    }
    *sum = all;
  }
}

// Adds what 32 rows give to the tokens [first, first + kWarpTokens) of a warp: lanes look each at a row, then are channels.
template <typename T>
__device__ __forceinline__ void add_rows(const GradientParams<T>& params, const LossRow* table,
                                         int32_t first_row, int64_t held_row_index, int32_t head,
                                         const T* queries, int32_t first, float* sums) {
  using Tr = GradientTraits;
  const LossSpan& span = params.span;
  const int lane = static_cast<int>(threadIdx.x) % device::kWarpSize;
  const bool present = first_row + lane < span.rows;
  const LossRow row = present ? table[first_row + lane] : LossRow{-1, 0, 0, 0};
  // Units that have any of the tokens, as far as the row counts them and they are held.
  const int32_t column = first_column_of(span, row.start) - span.first_column;
  const int32_t begin = max((first - row.start) / span.unit - (first < row.start ? 1 : 0), max(-column, 0));
  const int32_t last_token = first + Tr::kWarpTokens - 1 - row.start;
  const int32_t end =
      last_token < 0 ? 0 : min(last_token / span.unit + 1, min(row.units, span.num_columns - column));
  const int64_t at = (held_row_index + lane) * params.held.index_heads + head;
  const float* of_scores = params.held.masses + at * params.held.parts * span.num_columns;
  const int32_t* places = params.held.places + at * span.num_columns;
  const int32_t most = __reduce_max_sync(device::kFullMask, end - begin);
  for (int32_t i = 0; i < most; ++i) {
    float value = 0.0f;
    int32_t token = -1;
    if (begin + i < end) {
      value = of_scores[column + begin + i];
      token = row.start + (begin + i) * span.unit + places[column + begin + i] - first;
    }
    unsigned giving =
        __ballot_sync(device::kFullMask, value != 0.0f && token >= 0 && token < Tr::kWarpTokens);
    while (giving != 0) {
      const int from = __ffs(static_cast<int>(giving)) - 1;
      giving &= giving - 1;
      const float gradient = __shfl_sync(device::kFullMask, value, from);
      const int32_t place = __shfl_sync(device::kFullMask, token, from);
      const int32_t position = __shfl_sync(device::kFullMask, row.token, from);
      const T* query = queries + position * params.query.row;
      for (int c = lane; c < params.d; c += device::kWarpSize) {
        float& sum = sums[place * params.d + c];
        sum = fmaf(gradient, device::to_acc(query[c]), sum);
      }
    }
  }
}

// Grid: x = tiles of tokens, y = index heads, z = batches of the launch.
template <typename T>
__global__ void __launch_bounds__(GradientTraits::kThreads)
    key_gradient_kernel(const KeyGradientParams<T> params) {
  using Tr = GradientTraits;
  extern __shared__ __align__(16) float token_sums[];
  const GradientParams<T>& of = params.of;
  const LossSpan& span = of.span;
  const int warp = static_cast<int>(threadIdx.x) / device::kWarpSize;
  const int lane = static_cast<int>(threadIdx.x) % device::kWarpSize;
  const int32_t head = static_cast<int32_t>(blockIdx.y), local = static_cast<int32_t>(blockIdx.z);
  const int64_t batch = span.first_batch + local;
  const int32_t tile = params.first_token + static_cast<int32_t>(blockIdx.x) * Tr::kTokens;
  const int32_t first = tile + warp * Tr::kWarpTokens;
  // A warp's sums are its own, so that no barrier is needed.
  float* sums = token_sums + warp * Tr::kWarpTokens * of.d;
  for (int i = lane; i < Tr::kWarpTokens * of.d; i += device::kWarpSize) {
    sums[i] = 0.0f;
  }
  __syncwarp();
  const T* queries = of.query.data + batch * of.query.batch + head * of.query.head;
  const LossRow* table = table_of(span, local);
  for (int32_t row = 0; row < span.rows && first < params.last_token; row += device::kWarpSize) {
    add_rows(of, table, row, static_cast<int64_t>(local) * span.rows + row, head, queries, first, sums);
  }
  __syncwarp();
  T* gradient = params.gradient.data + batch * params.gradient.batch + head * params.gradient.head;
  for (int i = lane; i < Tr::kWarpTokens * of.d; i += device::kWarpSize) {
    const int64_t token = first + i / of.d;
    if (token < params.last_token) {
      gradient[token * params.gradient.row + i % of.d] = device::from_acc<T>(sums[i]);
    }
  }
}

// Grid: x = rows of all batches, y = index heads. Positions that were drawn twice lie side by side, and the first adds up.
template <typename T>
__global__ void __launch_bounds__(GradientTraits::kMostWidth)
    query_gradient_kernel(const QueryGradientParams<T> params) {
  const int64_t index = blockIdx.x;
  const int32_t head = static_cast<int32_t>(blockIdx.y), channel = static_cast<int32_t>(threadIdx.x);
  const int32_t row = static_cast<int32_t>(index % params.rows);
  const LossRow mine = params.table[index];
  if (mine.token < 0 || channel >= params.d || (row > 0 && params.table[index - 1].token == mine.token)) {
    return;
  }
  float sum = 0.0f;
  for (int64_t i = index; i < index - row + params.rows && params.table[i].token == mine.token; ++i) {
    sum += params.row_sums[(i * params.index_heads + head) * params.d + channel];
  }
  const View<T>& to = params.gradient;
  to.data[index / params.rows * to.batch + mine.token * to.row + head * to.head + channel] =
      device::from_acc<T>(sum);
}

template <typename T>
cudaError_t launch_row_gradients(const GradientParams<T>& params, cudaStream_t stream) {
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>(params.span.num_batches * params.span.rows),
                                       static_cast<unsigned>(params.held.index_heads)),
                          .threads = GradientTraits::kThreads};
  return launch_kernel(row_gradients_kernel<T>, shape, stream, params);
}

template <typename T>
cudaError_t launch_key_gradient(const KeyGradientParams<T>& params, cudaStream_t stream) {
  using Tr = GradientTraits;
  const LaunchShape shape{
      .grid = dim3(static_cast<unsigned>(ceil_div(params.last_token - params.first_token, Tr::kTokens)),
                   static_cast<unsigned>(params.of.held.index_heads),
                   static_cast<unsigned>(params.of.span.num_batches)),
      .threads = Tr::kThreads,
      .shared_bytes = static_cast<int64_t>(Tr::kTokens) * params.of.d * static_cast<int64_t>(sizeof(float))};
  return launch_kernel(key_gradient_kernel<T>, shape, stream, params);
}

template <typename T>
cudaError_t launch_query_gradient(const QueryGradientParams<T>& params, cudaStream_t stream) {
  const LaunchShape shape{
      .grid = dim3(static_cast<unsigned>(static_cast<int64_t>(params.batch) * params.rows),
                   static_cast<unsigned>(params.index_heads)),
      .threads = GradientTraits::kMostWidth};
  return launch_kernel(query_gradient_kernel<T>, shape, stream, params);
}

}  // namespace htree::index_loss
