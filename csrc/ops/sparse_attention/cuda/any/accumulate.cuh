// Softmax states of the candidates whose score is not -inf: a block has one list row, up to kHeads of its
// query heads and one span of value columns.
//
// First comes the maximum over the candidates. Then, tile by tile, the weights stand in shared memory, and
// `num_teams` teams of `lanes` threads gather the value rows, team i every num_teams-th row from the i-th on;
// a thread has one pack of columns for all heads. The sums of the teams are added in order at the end.
#pragma once

#include <algorithm>
#include <type_traits>

#include "device/numeric.cuh"
#include "device/online_softmax.cuh"
#include "device/pack.cuh"
#include "device/work.cuh"
#include "host/cuda/kernel_launch.h"
#include "ops/sparse_attention/cuda/any/accumulate.h"
#include "ops/tree/cuda/any/geometry.h"
#include "ops/tree/cuda/any/lists.cuh"

namespace htree::tree_attention {

struct AccumulateTraits {
  static constexpr int kThreads = 256;
  static constexpr int kTile = kThreads;  // candidates of a tile: a thread makes the weights of one
  static constexpr int kMaxLanes = 32;    // threads on one value row
  static constexpr int kRowsInFlight = 4;
  static constexpr int kMaxHeads = 8;
};

template <int kHeads, int kPack>
struct AccumulateShared {
  alignas(16) float weights[AccumulateTraits::kTile][kHeads];
  float parts[AccumulateTraits::kThreads * kPack];  // the columns of every thread, for one head
  int32_t nodes[AccumulateTraits::kTile];           // -1 where no head has a weight: the value is not read
  // Bit per head: the score is -inf, so its product with the value must not be formed.
  uint32_t unused[AccumulateTraits::kTile];
  float reduced[kHeads][AccumulateTraits::kThreads / device::kWarpSize];
  int first_missing[AccumulateTraits::kThreads / device::kWarpSize];
};

// Stores the weights of this thread's candidate in shared memory and adds them to the sums. Returns true when
// some heads, but not all, have no weight.
template <int kHeads, int kPack>
__device__ __forceinline__ bool stage_weights(const ListInfo& info, const float* scores, int64_t stride,
                                              int64_t num_heads, int64_t p, int64_t num_candidates,
                                              const float (&maximum)[kHeads], float (&sums)[kHeads],
                                              AccumulateShared<kHeads, kPack>& shared) {
  constexpr uint32_t kAll = (1u << kHeads) - 1;
  const uint32_t absent = kAll & ~((1u << num_heads) - 1);
  uint32_t unused = kAll;
  int64_t node = -1;
  if (p < num_candidates) {
    node = info.node(p);
  }
  if (node >= 0) {
    float values[kHeads];
    load_head_scores(scores + p * stride, num_heads, values);
    unused = 0;
#pragma unroll
    for (int head = 0; head < kHeads; ++head) {
      const bool used = values[head] != device::negative_infinity<float>();
      const float weight = used ? expf(values[head] - maximum[head]) : 0.0f;
      unused |= used ? 0 : 1u << head;
      sums[head] += weight;
      shared.weights[threadIdx.x][head] = weight;
    }
  } else {
#pragma unroll
    for (int head = 0; head < kHeads; ++head) {
      shared.weights[threadIdx.x][head] = 0.0f;
    }
  }
  shared.nodes[threadIdx.x] = unused == kAll ? -1 : static_cast<int32_t>(node);
  shared.unused[threadIdx.x] = unused;
  return unused != kAll && unused != absent;
}

// Adds the weighted values of this thread's team in the tile to the thread's columns.
template <bool kMixed, typename T, int kHeads, int kPack>
__device__ __forceinline__ void gather_tile(const T* values, int64_t row_stride, int team, int num_teams,
                                            bool active, const AccumulateShared<kHeads, kPack>& shared,
                                            float (&out)[kHeads][kPack]) {
  using Traits = AccumulateTraits;
  constexpr int kRows = kMixed ? 1 : Traits::kRowsInFlight;
  for (int first = team; first < Traits::kTile; first += kRows * num_teams) {
    device::Pack<T, kPack> rows[kRows];
    int candidates[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int candidate = first + i * num_teams;
      candidates[i] = candidate < Traits::kTile ? candidate : -1;
      const int32_t node = candidates[i] >= 0 ? shared.nodes[candidate] : -1;
      if (node < 0 || !active) {
        candidates[i] = -1;
      } else {
        rows[i] = device::load_pack<kPack>(values + node * row_stride);
      }
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (candidates[i] >= 0) {
        float value[kPack];
#pragma unroll
        for (int e = 0; e < kPack; ++e) {
          value[e] = device::to_acc(rows[i][e]);
        }
#pragma unroll
        for (int head = 0; head < kHeads; ++head) {
          const float weight = shared.weights[candidates[i]][head];
          if (kMixed && (shared.unused[candidates[i]] >> head & 1)) {
            continue;
          }
#pragma unroll
          for (int e = 0; e < kPack; ++e) {
            out[head][e] = fmaf(weight, value[e], out[head][e]);
          }
        }
      }
    }
  }
}

// Adds the columns of the teams in order and stores them. Every thread of the block must call.
template <int kHeads, int kPack>
__device__ __forceinline__ void store_columns(float* out, int64_t value_dim, int64_t num_heads,
                                              int64_t first_column, int lanes, int num_teams,
                                              const float (&columns)[kHeads][kPack],
                                              AccumulateShared<kHeads, kPack>& shared) {
  const int width = lanes * kPack;
#pragma unroll
  for (int head = 0; head < kHeads; ++head) {
    if (head >= num_heads) {
      break;
    }
    __syncthreads();
#pragma unroll
    for (int e = 0; e < kPack; ++e) {
      shared.parts[threadIdx.x * kPack + e] = columns[head][e];
    }
    __syncthreads();
    for (int column = threadIdx.x; column < width; column += AccumulateTraits::kThreads) {
      float total = 0.0f;
      for (int team = 0; team < num_teams; ++team) {
        total += shared.parts[team * width + column];
      }
      if (first_column + column < value_dim) {
        out[head * value_dim + first_column + column] = total;
      }
    }
  }
}

// Grid: x = list rows, y = spans; span = head chunk * num_column_spans + column span.
template <typename Work, typename T, int kHeads, int kPack>
__global__ void __launch_bounds__(AccumulateTraits::kThreads, 2)
    accumulate_kernel(const AccumulateParams<T> params, int lanes, int num_column_spans) {
  using Traits = AccumulateTraits;
  __shared__ AccumulateShared<kHeads, kPack> shared;
  const Geometry& geometry = params.geometry;
  const RowIndex row = row_index(blockIdx.x, geometry.num_queries, geometry.num_lists);
  const ListInfo info = list_info<Traits::kThreads>(geometry, params.parents, row, shared.first_missing);
  const int64_t num_candidates =
      min(info.num_candidates, static_cast<int64_t>(params.num_candidates[blockIdx.x]));
  const int64_t first_head = static_cast<int64_t>(blockIdx.y / num_column_spans) * kHeads;
  const int64_t num_heads = min(static_cast<int64_t>(kHeads), geometry.group - first_head);
  const int column_span = static_cast<int>(blockIdx.y % num_column_spans);
  const float* scores =
      params.scores + static_cast<int64_t>(blockIdx.x) * geometry.capacity() * geometry.group + first_head;

  float maximum[kHeads];
#pragma unroll
  for (int head = 0; head < kHeads; ++head) {
    maximum[head] = device::negative_infinity<float>();
  }
  for (int64_t p = threadIdx.x; p < num_candidates; p += Traits::kThreads) {
    float values[kHeads];
    load_head_scores(scores + p * geometry.group, num_heads, values);
    const bool present = info.node(p) >= 0;
#pragma unroll
    for (int head = 0; head < kHeads; ++head) {
      maximum[head] = present ? device::MaxNan{}(maximum[head], values[head]) : maximum[head];
    }
  }
#pragma unroll
  for (int head = 0; head < kHeads; ++head) {
    maximum[head] =
        device::block_reduce<Traits::kThreads, device::MaxNan>(maximum[head], shared.reduced[head]);
  }

  const int lane = threadIdx.x % lanes;
  const int team = threadIdx.x / lanes;
  const int num_teams = Traits::kThreads / lanes;
  const int64_t first_column = static_cast<int64_t>(column_span) * lanes * kPack;
  const int64_t column = first_column + lane * kPack;
  const T* values = at_row(params.values, row.batch, 0, geometry.kv_head(row.list)) + column;
  float sums[kHeads] = {};
  float columns[kHeads][kPack] = {};
  for (int64_t tile = 0; tile < num_candidates; tile += Traits::kTile) {
    __syncthreads();
    const bool mixed = stage_weights(info, scores, geometry.group, num_heads, tile + threadIdx.x,
                                     num_candidates, maximum, sums, shared);
    if (__syncthreads_or(mixed)) {
      gather_tile<true>(values, params.values.row, team, num_teams, column < params.value_dim, shared,
                        columns);
    } else {
      gather_tile<false>(values, params.values.row, team, num_teams, column < params.value_dim, shared,
                         columns);
    }
  }

  const int64_t state_row =
      row.batch * params.state.batch + row.query * params.state.row + row.list * geometry.group + first_head;
  store_columns(params.state.out + state_row * params.value_dim, params.value_dim, num_heads, first_column,
                lanes, num_teams, columns, shared);
  __syncthreads();
#pragma unroll
  for (int head = 0; head < kHeads; ++head) {
    const float total = device::block_reduce<Traits::kThreads, device::Sum>(sums[head], shared.reduced[head]);
    if (threadIdx.x == 0 && column_span == 0 && head < num_heads) {
      params.state.max[state_row + head] = maximum[head];
      params.state.sum[state_row + head] = total;
    }
  }
}

template <typename T, int kHeads, int kPack>
cudaError_t launch_accumulate_for(const AccumulateParams<T>& params, cudaStream_t stream) {
  using Traits = AccumulateTraits;
  const int64_t packs = (params.value_dim + kPack - 1) / kPack;
  int lanes = 1;
  while (lanes < packs && lanes < Traits::kMaxLanes) {
    lanes *= 2;
  }
  const int64_t column_spans = std::max<int64_t>(1, (packs + lanes - 1) / lanes);
  const int64_t head_chunks = (params.geometry.group + kHeads - 1) / kHeads;
  const dim3 grid(static_cast<unsigned>(params.geometry.num_rows()),
                  static_cast<unsigned>(column_spans * head_chunks));
  return launch_kernel(accumulate_kernel<FullWork, T, kHeads, kPack>,
                       {.grid = grid, .threads = Traits::kThreads}, stream, params, lanes,
                       static_cast<int>(column_spans));
}

template <typename T>
cudaError_t launch_accumulate(const AccumulateParams<T>& params, cudaStream_t stream) {
  if (params.geometry.num_rows() == 0 || params.geometry.group == 0) {
    return cudaSuccess;
  }
  constexpr int kWide = device::kPackOf<T>;
  const bool wide = params.value_dim % kWide == 0 && rows_aligned(params.values);
  const auto run = [&](auto heads) {
    constexpr int kHeads = decltype(heads)::value;
    return wide ? launch_accumulate_for<T, kHeads, kWide>(params, stream)
                : launch_accumulate_for<T, kHeads, 1>(params, stream);
  };
  const int64_t group = params.geometry.group;
  if (group == 1) {
    return run(std::integral_constant<int, 1>{});
  }
  if (group == 2) {
    return run(std::integral_constant<int, 2>{});
  }
  if (group <= 4) {
    return run(std::integral_constant<int, 4>{});
  }
  return run(std::integral_constant<int, AccumulateTraits::kMaxHeads>{});
}

}  // namespace htree::tree_attention
