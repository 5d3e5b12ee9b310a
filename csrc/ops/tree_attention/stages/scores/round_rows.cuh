// Rounds rows to int8: a warp takes a row, and a lane every 32nd pair of its rotation.
#pragma once

#include "device/numeric.cuh"
#include "device/rotary.cuh"
#include "host/cuda/kernel_launch.h"
#include "ops/tree_attention/cuda/int8_rows.cuh"
#include "ops/tree_attention/stages/lists.cuh"
#include "ops/tree_attention/stages/scores/round_rows.h"

namespace htree::tree_attention {

constexpr int kRoundWarps = 8;

template <typename T>
__global__ void __launch_bounds__(kRoundWarps* device::kWarpSize)
    round_rows_kernel(const RoundRowsParams<T> params) {
  const int64_t index = int64_t{blockIdx.x} * kRoundWarps + threadIdx.x / device::kWarpSize;
  if (index >= params.num_batches * params.num_rows * params.num_heads) {
    return;
  }
  const RowIndex row = row_index(index, params.num_rows, params.num_heads);
  const int64_t half = params.key_dim / 2;
  const int64_t position = min((params.first + row.query * params.step) / params.span, params.last_position);
  const T* from = at_row(params.rows, row.batch, row.query, row.list);
  const auto load = [&](int64_t pair, float& low, float& high) {
    low = device::to_acc(from[pair]);
    high = device::to_acc(from[half + pair]);
    if (params.table.cos != nullptr) {
      device::rotate_pair(low, high, params.table.cos[position * params.table.cos_row + pair],
                          params.table.sin[position * params.table.sin_row + pair]);
    }
  };
  uint32_t largest = 0;
  for (int64_t pair = threadIdx.x % device::kWarpSize; pair < half; pair += device::kWarpSize) {
    float low, high;
    load(pair, low, high);
    largest = max(largest, max(magnitude_bits(low), magnitude_bits(high)));
  }
  const RowRounding rounding(largest_of_lanes<device::kWarpSize>(largest));
  T* to = params.integers + index * params.key_dim;
  for (int64_t pair = threadIdx.x % device::kWarpSize; pair < half; pair += device::kWarpSize) {
    float low, high;
    load(pair, low, high);
    to[pair] = device::from_acc<T>(static_cast<float>(rounding(low)));
    to[half + pair] = device::from_acc<T>(static_cast<float>(rounding(high)));
  }
  if (threadIdx.x % device::kWarpSize == 0) {
    params.steps[index] = rounding.step * params.scale;
  }
}

template <typename T>
cudaError_t launch_round_rows(const RoundRowsParams<T>& params, cudaStream_t stream) {
  const int64_t rows = params.num_batches * params.num_rows * params.num_heads;
  if (rows == 0) {
    return cudaSuccess;
  }
  return launch_kernel(round_rows_kernel<T>,
                       {.grid = static_cast<unsigned>((rows + kRoundWarps - 1) / kRoundWarps),
                        .threads = kRoundWarps * device::kWarpSize},
                       stream, params);
}

}  // namespace htree::tree_attention
