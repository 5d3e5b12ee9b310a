// The table of positions, log-sum-exps from the statistics of shares, and the divergences of rows.
// docs/semantics/index_loss.md §9.3
#include <climits>

#include "device/reduce.cuh"
#include "host/cuda/kernel_launch.h"
#include "ops/index_loss/cuda/any/held_blocks.cuh"
#include "ops/index_loss/cuda/any/loss_state.cuh"

namespace htree::index_loss {
namespace {

constexpr int kThreads = 256;

// The row of a position, but for run_end. Offsets ascend, and so do the starts: what lies behind all documents begins
// behind them too.
__device__ __forceinline__ LossRow resolve_row(const LossRowParams& params, int64_t position) {
  int32_t start = 0, end = params.tokens;
  if (params.cu_seqlens != nullptr) {
    int low = 0, high = params.num_documents;  // the first offset above the position, or the last one
    while (low < high) {
      const int middle = (low + high) / 2;
      if (params.cu_seqlens[middle] > position) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    start = low > 0 ? params.cu_seqlens[low - 1] : 0;
    end = low > 0 ? params.cu_seqlens[low] : 0;
  }
  const bool inside = position >= start && position < end;
  const int32_t blocks = inside ? (static_cast<int32_t>(position) - start) / params.block_size : 0;
  const int32_t token = blocks > 0 ? static_cast<int32_t>(position) : -1;
  return {token, position < end ? start : INT_MAX, blocks * (params.block_size / params.unit), 0};
}

// A thread block for each batch.
__global__ void __launch_bounds__(kThreads) loss_rows_kernel(const LossRowParams params) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * params.rows;
  LossRow* table = params.table + first;
  for (int32_t row = threadIdx.x; row < params.rows; row += kThreads) {
    table[row] = resolve_row(params, params.positions[first + row]);
  }
  __syncthreads();
  int32_t counted = 0;
  for (int32_t row = threadIdx.x; row < params.rows; row += kThreads) {
    int32_t low = row + 1, high = params.rows;  // starts ascend with the positions
    while (low < high) {
      const int32_t middle = (low + high) / 2;
      if (table[middle].start > table[row].start) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    table[row].run_end = low;
    counted += table[row].token >= 0 ? 1 : 0;
  }
  counted = device::warp_reduce<device::Sum>(counted);
  if (threadIdx.x % device::kWarpSize == 0) {
    atomicAdd(params.counted, counted);
  }
}

__global__ void __launch_bounds__(kThreads) combine_statistics_kernel(const CombineParams params) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (row >= params.num_rows) {
    return;
  }
  float2 all = params.partials[row];
  for (int32_t split = 1; split < params.splits; ++split) {
    const float2 other = params.partials[split * params.num_rows + row];
    const float largest = fmaxf(all.x, other.x);
    all = {largest, all.y * exp2f(all.x - largest) + other.y * exp2f(other.x - largest)};
  }
  params.lse[row] = (all.x + log2f(all.y)) * 0.6931471805599453f;
}

__device__ __forceinline__ LossState other_lane(const LossState& state, int offset) {
  return {__shfl_xor_sync(device::kFullMask, state.max, offset),
          __shfl_xor_sync(device::kFullMask, state.sum, offset),
          __shfl_xor_sync(device::kFullMask, state.cross, offset),
          __shfl_xor_sync(device::kFullMask, state.mass, offset)};
}

// Grid: x = rows of all batches of the launch, y = index heads.
__global__ void __launch_bounds__(kThreads) row_losses_kernel(const RowLossParams params) {
  __shared__ LossState of_warps[kThreads / device::kWarpSize];
  const LossSpan& span = params.span;
  const HeldColumns& held = params.held;
  const int64_t held_index = blockIdx.x,
                index = static_cast<int64_t>(span.first_batch) * span.rows + held_index;
  const int32_t head = static_cast<int32_t>(blockIdx.y);
  const LossRow row = span.table[index];
  LossState state = LossState::empty();
  if (row.units > 0) {
    const HeldRow columns = held_row(span, held, held_index, head);
    const BlockRange blocks = held_blocks(span, row);
    const int32_t before = held.first_block - row.start / span.block_size;  // of earlier ranges
    for (int32_t b = max(blocks.first, before) + static_cast<int32_t>(threadIdx.x); b < blocks.last;
         b += kThreads) {
      const HeldBlock block = held_block(span, held, columns, blocks.column + b * blocks.units, blocks.units);
      state.add(block.mass, block.score);
    }
  }
  for (int offset = device::kWarpSize / 2; offset > 0; offset /= 2) {
    state.merge(other_lane(state, offset));
  }
  if (threadIdx.x % device::kWarpSize == 0) {
    of_warps[threadIdx.x / device::kWarpSize] = state;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    LossState& all = params.states[index * held.index_heads + head];
    LossState merged = held.is_first ? LossState::empty() : all;
    for (const LossState& other : of_warps) {
      merged.merge(other);
    }
    all = merged;
  }
}

// One thread block: the sum of few numbers, in a fixed order.
constexpr int kMeanThreads = 1024;
__global__ void __launch_bounds__(kMeanThreads) mean_loss_kernel(const MeanParams params) {
  __shared__ double scratch[kMeanThreads / device::kWarpSize];
  double sum = 0.0;
  for (int64_t i = threadIdx.x; i < params.num_rows * params.index_heads; i += kMeanThreads) {
    const LossState state = params.states[i];
    params.index_lse[i] = state.log_sum();
    if (params.table[i / params.index_heads].units > 0) {
      sum += static_cast<double>(state.divergence());
    }
  }
  sum = device::block_reduce<kMeanThreads, device::Sum>(sum, scratch);
  if (threadIdx.x == 0) {
    const int32_t counted = *params.counted;
    params.loss[0] =
        counted == 0 ? 0.0f : static_cast<float>(sum / (static_cast<double>(counted) * params.index_heads));
  }
}

}  // namespace

cudaError_t launch_loss_rows(const LossRowParams& params, cudaStream_t stream) {
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>(params.batch)), .threads = kThreads};
  return launch_kernel(loss_rows_kernel, shape, stream, params);
}

cudaError_t launch_combine_statistics(const CombineParams& params, cudaStream_t stream) {
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>(ceil_div(params.num_rows, kThreads))),
                          .threads = kThreads};
  return launch_kernel(combine_statistics_kernel, shape, stream, params);
}

cudaError_t launch_row_losses(const RowLossParams& params, cudaStream_t stream) {
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>(params.span.num_batches * params.span.rows),
                                       static_cast<unsigned>(params.held.index_heads)),
                          .threads = kThreads};
  return launch_kernel(row_losses_kernel, shape, stream, params);
}

cudaError_t launch_mean_loss(const MeanParams& params, cudaStream_t stream) {
  const LaunchShape shape{.grid = dim3(1), .threads = kMeanThreads};
  return launch_kernel(mean_loss_kernel, shape, stream, params);
}

}  // namespace htree::index_loss
