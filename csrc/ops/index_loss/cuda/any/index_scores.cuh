// The largest product of an index query with the keys of each column, and which key has it first. A thread block has up to
// kScorePositions positions; lanes side by side take the tokens of a column. The products are 1/32 of the attention's, so
// that one kernel in fp32 serves every dtype and block size.
#pragma once

#include <climits>

#include "device/reduce.cuh"
#include "host/cuda/kernel_launch.h"
#include "ops/index_loss/cuda/any/loss_rows.cuh"
#include "ops/index_loss/cuda/any/row_products.cuh"
#include "ops/index_loss/index_loss_plan.h"

namespace htree::index_loss {

struct ScoreTraits {
  static constexpr int kThreads = 128;
  static constexpr int kPositions = static_cast<int>(kScorePositions);
  static constexpr int kMostWidth = 128;
};

// Of equal products the first; a NaN is above all.
struct Best {
  float score;
  int32_t place;

  __device__ __forceinline__ void take(float other, int32_t other_place) {
    const bool larger = other > score || (other == score && other_place < place) ||
                        (other != other && (score == score || other_place < place));
    score = larger ? other : score;
    place = larger ? other_place : place;
  }
};

// Rows [first, last) of one document, whose queries are in shared memory from query `offset` on.
template <typename T>
__device__ __forceinline__ void score_run(const ScoreParams<T>& params, const LossRow* table, int32_t offset,
                                          int32_t first, int32_t last, const UnitRange& units, const T* keys,
                                          int lanes, const float (*queries)[ScoreTraits::kPositions]) {
  using Tr = ScoreTraits;
  const LossSpan& span = params.span;
  const int32_t head = static_cast<int32_t>(blockIdx.z) % params.heads;
  const int64_t batch_row = static_cast<int64_t>(blockIdx.z) / params.heads * span.rows;
  const int groups = Tr::kThreads / lanes;
  const int group = static_cast<int>(threadIdx.x) / lanes, lane = static_cast<int>(threadIdx.x) % lanes;
  for (int32_t tile = units.begin; tile < units.end; tile += groups) {
    const int32_t unit = tile + group;
    Best best[Tr::kPositions];
#pragma unroll
    for (int r = 0; r < Tr::kPositions; ++r) {
      best[r] = {device::negative_infinity<float>(), INT_MAX};
    }
    for (int32_t i = lane; unit < units.end && i < span.unit; i += lanes) {
      float sums[Tr::kPositions] = {};
      multiply_key(keys + (static_cast<int64_t>(unit) * span.unit + i) * params.key.row, params.d, queries,
                   sums);
#pragma unroll
      for (int r = 0; r < Tr::kPositions; ++r) {
        best[r].take(sums[r], i);
      }
    }
    for (int width = lanes / 2; width > 0; width /= 2) {
#pragma unroll
      for (int r = 0; r < Tr::kPositions; ++r) {
        const float score = __shfl_xor_sync(device::kFullMask, best[r].score, width);
        const int32_t place = __shfl_xor_sync(device::kFullMask, best[r].place, width);
        best[r].take(score, place);
      }
    }
#pragma unroll
    for (int r = 0; r < Tr::kPositions; ++r) {
      const int32_t row = offset + r;
      if (lane == r % lanes && row >= first && row < last && unit < min(table[row].units, units.end)) {
        const int64_t at = ((batch_row + row) * params.heads + head) * span.num_columns + units.column + unit;
        params.scores[at] = best[r].score;
        params.places[at] = best[r].place;
      }
    }
  }
}

// Grid: x = tiles of positions, y = splits of the columns, z = batches and index heads.
template <typename T>
__global__ void __launch_bounds__(ScoreTraits::kThreads)
    index_scores_kernel(const ScoreParams<T> params, int lanes) {
  using Tr = ScoreTraits;
  __shared__ __align__(16) float queries[Tr::kMostWidth][Tr::kPositions];
  const LossSpan& span = params.span;
  const int32_t head = static_cast<int32_t>(blockIdx.z) % params.heads;
  const int32_t local = static_cast<int32_t>(blockIdx.z) / params.heads;
  const int64_t batch = span.first_batch + local;
  const LossRow* table = table_of(span, local);
  const int32_t first = static_cast<int32_t>(blockIdx.x) * Tr::kPositions;
  const int32_t last = min(first + Tr::kPositions, span.rows);
  const T* query = params.query.data + batch * params.query.batch + head * params.query.head;
  for (int item = threadIdx.x; item < params.d * Tr::kPositions; item += Tr::kThreads) {
    const int c = item % params.d, r = item / params.d;
    const int32_t token = first + r < last ? table[first + r].token : -1;
    queries[c][r] = token >= 0 ? device::to_acc(query[token * params.query.row + c]) : 0.0f;
  }
  __syncthreads();
  const T* keys = params.key.data + batch * params.key.batch + head * params.key.head;
  for_runs(table, first, last, [&](int32_t begin, int32_t end, int32_t start, int32_t most) {
    const UnitRange units = units_of_split(span, start, most, static_cast<int32_t>(blockIdx.y));
    score_run(params, table, first, begin, end, units, keys + start * params.key.row, lanes, queries);
  });
}

template <typename T>
cudaError_t launch_index_scores(const ScoreParams<T>& params, cudaStream_t stream) {
  using Tr = ScoreTraits;
  const LossSpan& span = params.span;
  int lanes = 1;
  while (lanes < span.unit && lanes < device::kWarpSize) {
    lanes *= 2;
  }
  const LaunchShape shape{.grid = dim3(static_cast<unsigned>(ceil_div(span.rows, Tr::kPositions)),
                                       static_cast<unsigned>(ceil_div(span.num_columns, span.split_columns)),
                                       static_cast<unsigned>(span.num_batches * params.heads)),
                          .threads = Tr::kThreads};
  return launch_kernel(index_scores_kernel<T>, shape, stream, params, lanes);
}

}  // namespace htree::index_loss
