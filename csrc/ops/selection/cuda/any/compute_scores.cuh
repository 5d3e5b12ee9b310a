// Scores kernel: a block has one list row, a thread one candidate of the current tile, for up
// to kHeads query heads.
//
// The keys of a tile are rotated once and stand in shared memory as floats, one slice of the key dimension at
// a time; the rotated queries of the group are broadcast. Every score is one sequential sum over the key
// dimension, so it does not depend on the launch shape.
//
// The IO-only variant adds up what it loads instead of rotating
// and multiplying (docs/semantics/io_only.md §2.3).
#pragma once

#include <algorithm>

#include "device/numeric.cuh"
#include "device/online_softmax.cuh"
#include "device/pack.cuh"
#include "device/reduce.cuh"
#include "device/rotary.cuh"
#include "device/work.cuh"
#include "host/cuda/kernel_launch.h"
#include "ops/selection/cuda/any/compute_scores.h"
#include "ops/tree/cuda/any/lists.cuh"
#include "ops/tree/io_formulas.h"

namespace htree::tree_attention {

struct ScoresTraits {
  static constexpr int kThreads = 128;
  static constexpr int kTile = kThreads;     // candidates of a tile
  static constexpr int kPairs = 32;          // rotary pairs in a slice of the key dimension
  static constexpr int kStride = kTile + 1;  // odd: packs of neighbouring pairs fall into different banks
  static constexpr int kMaxHeads = 8;
};

template <int kHeads>
struct ScoresShared {
  float keys[2 * ScoresTraits::kPairs][ScoresTraits::kStride];  // the lower halves, then the upper halves
  alignas(16) float queries[2 * ScoresTraits::kPairs][kHeads];
  int32_t nodes[ScoresTraits::kTile];
  int first_missing[ScoresTraits::kThreads / device::kWarpSize];
};

// Loads `kPack` floats of a table row. Rows of whole packs are aligned to 16 bytes.
template <int kPack>
__device__ __forceinline__ void load_table(const float* row, float (&values)[kPack]) {
  constexpr int kStep = kPack < 4 ? kPack : 4;
#pragma unroll
  for (int i = 0; i < kPack; i += kStep) {
    const auto pack = device::load_pack<kStep>(row + i);
#pragma unroll
    for (int e = 0; e < kStep; ++e) {
      values[i + e] = pack[e];
    }
  }
}

// Rotates one slice of the tile's keys, each at its position p, into shared memory; where there is no key,
// zeros. The IO-only variant leaves one sum per pack in the pack's row.
template <typename Work, int kPack, typename T, int kHeads>
__device__ __forceinline__ void stage_keys(const ScoresParams<T>& params, const T* keys, int64_t first_p,
                                           int64_t first_pair, ScoresShared<kHeads>& shared) {
  using Traits = ScoresTraits;
  constexpr int kPacks = Traits::kPairs / kPack;
  const int64_t half = params.key_dim / 2;
#pragma unroll 2
  for (int item = threadIdx.x; item < Traits::kTile * kPacks; item += Traits::kThreads) {
    const int pair_in_slice = item % kPacks * kPack;
    const int candidate = item / kPacks;
    const int64_t pair = first_pair + pair_in_slice;
    const int32_t node = shared.nodes[candidate];
    float low[kPack] = {};
    float high[kPack] = {};
    float angles = 0.0f;
    if (node >= 0 && pair < half) {
      const T* key = keys + node * params.keys.row + pair;
      const auto stored_low = device::load_pack<kPack>(key);
      const auto stored_high = device::load_pack<kPack>(key + half);
#pragma unroll
      for (int e = 0; e < kPack; ++e) {
        low[e] = device::to_acc(stored_low[e]);
        high[e] = device::to_acc(stored_high[e]);
      }
      if (params.table.cos != nullptr) {
        float cos[kPack];
        float sin[kPack];
        load_table(params.table.cos + (first_p + candidate) * params.table.cos_row + pair, cos);
        load_table(params.table.sin + (first_p + candidate) * params.table.sin_row + pair, sin);
#pragma unroll
        for (int e = 0; e < kPack; ++e) {
          if constexpr (!Work::kIoOnly) {
            device::rotate_pair(low[e], high[e], cos[e], sin[e]);
          } else {
            angles += cos[e] + sin[e];
          }
        }
      }
    }
    if constexpr (!Work::kIoOnly) {
#pragma unroll
      for (int e = 0; e < kPack; ++e) {
        shared.keys[pair_in_slice + e][candidate] = low[e];
        shared.keys[Traits::kPairs + pair_in_slice + e][candidate] = high[e];
      }
    } else {
      constexpr float kKeyWeight = static_cast<float>(kIoKeyWeight);
      constexpr float kQueryWeight = static_cast<float>(kIoQueryWeight);
      float sum = 0.0f;
#pragma unroll
      for (int e = 0; e < kPack; ++e) {
        sum += low[e] + high[e];
      }
      shared.keys[item % kPacks][candidate] = kKeyWeight * sum + kQueryWeight * angles;
    }
  }
}

// Rotates one slice of the group's queries by position n - 1, times the scale, into shared memory. The IO-only variant
// leaves the sum of the slice in row 0. A warp has the pairs of one head.
template <typename Work, typename T, int kHeads>
__device__ __forceinline__ void stage_queries(const ScoresParams<T>& params, const T* queries,
                                              int64_t num_heads, int64_t position, int64_t first_pair,
                                              ScoresShared<kHeads>& shared) {
  using Traits = ScoresTraits;
  const int64_t half = params.key_dim / 2;
  for (int item = threadIdx.x; item < Traits::kPairs * kHeads; item += Traits::kThreads) {
    const int pair_in_slice = item % Traits::kPairs;
    const int head = item / Traits::kPairs;
    const int64_t pair = first_pair + pair_in_slice;
    float low = 0.0f;
    float high = 0.0f;
    if (head < num_heads && pair < half) {
      const T* query = queries + head * params.q.head + pair;
      low = device::to_acc(query[0]);
      high = device::to_acc(query[half]);
      if (params.table.cos != nullptr) {
        const float cos = params.table.cos[position * params.table.cos_row + pair];
        const float sin = params.table.sin[position * params.table.sin_row + pair];
        if constexpr (!Work::kIoOnly) {
          device::rotate_pair(low, high, cos, sin);
        } else {
          low += cos;
          high += sin;
        }
      }
    }
    if constexpr (!Work::kIoOnly) {
      shared.queries[pair_in_slice][head] = low * params.scale;
      shared.queries[Traits::kPairs + pair_in_slice][head] = high * params.scale;
    } else {
      static_assert(Traits::kPairs == device::kWarpSize);
      constexpr float kQueryWeight = static_cast<float>(kIoQueryWeight);
      const float sum = device::warp_reduce<device::Sum>(low + high);
      if (pair_in_slice == 0) {
        shared.queries[0][head] = kQueryWeight * sum;
      }
    }
  }
}

template <int kPack, int kHeads>
__device__ __forceinline__ void add_slice(const ScoresShared<kHeads>& shared, float (&sums)[kHeads]) {
  float sum = 0.0f;
#pragma unroll
  for (int pack = 0; pack < ScoresTraits::kPairs / kPack; ++pack) {
    sum += shared.keys[pack][threadIdx.x];
  }
#pragma unroll
  for (int head = 0; head < kHeads; ++head) {
    sums[head] += sum + shared.queries[0][head];
  }
}

template <int kHeads>
__device__ __forceinline__ void multiply_slice(const ScoresShared<kHeads>& shared, float (&sums)[kHeads]) {
  constexpr int kStep = kHeads < 4 ? kHeads : 4;
#pragma unroll 8
  for (int d = 0; d < 2 * ScoresTraits::kPairs; ++d) {
    const float key = shared.keys[d][threadIdx.x];
#pragma unroll
    for (int head = 0; head < kHeads; head += kStep) {
      const auto query = device::load_pack<kStep>(&shared.queries[d][head]);
#pragma unroll
      for (int e = 0; e < kStep; ++e) {
        sums[head + e] = fmaf(key, query[e], sums[head + e]);
      }
    }
  }
}

template <int kHeads>
__device__ __forceinline__ void store_scores(float* out, int64_t num_heads, const float (&sums)[kHeads]) {
  constexpr int kStep = kHeads < 4 ? kHeads : 4;
  if (num_heads == kHeads && reinterpret_cast<uintptr_t>(out) % (4 * kStep) == 0) {
#pragma unroll
    for (int head = 0; head < kHeads; head += kStep) {
      device::Pack<float, kStep> pack;
#pragma unroll
      for (int e = 0; e < kStep; ++e) {
        pack[e] = sums[head + e];
      }
      device::store_pack_streaming(out + head, pack);  // an ordinary store would drive the keys out of the L2
    }
    return;
  }
#pragma unroll
  for (int head = 0; head < kHeads; ++head) {
    if (head < num_heads) {
      out[head] = sums[head];
    }
  }
}

// Grid: x = list rows, y = splits; a split has tiles split, split + gridDim.y, ... of the row's candidates.
template <typename Work, typename T, int kHeads, int kPack>
__global__ void __launch_bounds__(ScoresTraits::kThreads)
    compute_scores_kernel(const ScoresParams<T> params) {
  using Traits = ScoresTraits;
  __shared__ ScoresShared<kHeads> shared;
  const Geometry& geometry = params.geometry;
  const RowIndex row = row_index(blockIdx.x, geometry.num_queries, geometry.num_lists);
  const ListInfo info = list_info<Traits::kThreads>(geometry, params.parents, row, shared.first_missing);
  const int64_t num_candidates = info.num_candidates;
  if (blockIdx.y == 0 && threadIdx.x == 0) {
    params.num_candidates[blockIdx.x] = static_cast<int32_t>(num_candidates);
  }

  const int64_t capacity = geometry.capacity();
  const int64_t end = params.fill_tail ? capacity : num_candidates;
  const T* keys = at_row(params.keys, row.batch, 0, geometry.kv_head(row.list));
  const T* queries = at_row(params.q, row.batch, row.query, row.list * geometry.group);
  float* scores = params.scores + static_cast<int64_t>(blockIdx.x) * capacity * geometry.group;

  for (int64_t tile = static_cast<int64_t>(blockIdx.y) * Traits::kTile; tile < end;
       tile += static_cast<int64_t>(gridDim.y) * Traits::kTile) {
    const int64_t p = tile + threadIdx.x;
    const int64_t node = p < num_candidates ? info.node(p) : -1;
    __syncthreads();
    shared.nodes[threadIdx.x] = static_cast<int32_t>(node);
    for (int64_t first_head = 0; first_head < geometry.group; first_head += kHeads) {
      const int64_t num_heads = min(static_cast<int64_t>(kHeads), geometry.group - first_head);
      float sums[kHeads] = {};
      if (tile < num_candidates) {
        for (int64_t first_pair = 0; first_pair < params.key_dim / 2; first_pair += Traits::kPairs) {
          __syncthreads();
          stage_keys<Work, kPack>(params, keys, tile, first_pair, shared);
          stage_queries<Work>(params, queries + first_head * params.q.head, num_heads, num_candidates - 1,
                              first_pair, shared);
          __syncthreads();
          if constexpr (!Work::kIoOnly) {
            multiply_slice(shared, sums);
          } else {
            add_slice<kPack>(shared, sums);
          }
        }
      }
      if (p < end) {
        if (node < 0) {
#pragma unroll
          for (int head = 0; head < kHeads; ++head) {
            sums[head] = device::negative_infinity<float>();
          }
        } else if constexpr (Work::kIoOnly) {
          constexpr float kHeadWeight = static_cast<float>(kIoHeadWeight);
          const float base = io_score_base(node, row.list, geometry.t0 + row.query * geometry.query_step);
#pragma unroll
          for (int head = 0; head < kHeads; ++head) {
            sums[head] += base + kHeadWeight * static_cast<float>(first_head + head);
          }
        }
        store_scores(scores + p * geometry.group + first_head, num_heads, sums);
      }
    }
  }
}

// compute_scores_kernel over the span means of each candidate: one after another they take the place of its
// key, and their scores are reduced in registers.
template <typename T, int kHeads, int kPack>
__global__ void __launch_bounds__(ScoresTraits::kThreads)
    compute_span_scores_kernel(const ComputeSpanScoresParams<T> params) {
  using Traits = ScoresTraits;
  __shared__ ScoresShared<kHeads> shared;
  const Geometry& geometry = params.row.geometry;
  const RowIndex row = row_index(blockIdx.x, geometry.num_queries, geometry.num_lists);
  const ListInfo info = list_info<Traits::kThreads>(geometry, params.row.parents, row, shared.first_missing);
  const int64_t num_candidates = info.num_candidates;
  if (blockIdx.y == 0 && threadIdx.x == 0) {
    params.row.num_candidates[blockIdx.x] = static_cast<int32_t>(num_candidates);
  }
  if (num_candidates <= params.top_k) {
    return;
  }
  const T* keys = at_row(params.row.keys, row.batch, 0, geometry.kv_head(row.list));
  const T* queries = at_row(params.row.q, row.batch, row.query, row.list * geometry.group);
  float* scores = params.row.scores + static_cast<int64_t>(blockIdx.x) * geometry.capacity() * geometry.group;
  const int64_t pairs = params.row.key_dim / 2;
  const int64_t num_means = min(params.means_per_node, params.num_means);

  for (int64_t tile = static_cast<int64_t>(blockIdx.y) * Traits::kTile; tile < num_candidates;
       tile += static_cast<int64_t>(gridDim.y) * Traits::kTile) {
    const int64_t p = tile + threadIdx.x;
    // The means of the rightmost candidate may hold tokens after the query.
    const int64_t node = p < num_candidates - 1 ? info.node(p) : -1;
    for (int64_t first_head = 0; first_head < geometry.group; first_head += kHeads) {
      const int64_t num_heads = min(static_cast<int64_t>(kHeads), geometry.group - first_head);
      device::OnlineSum sums[kHeads];
#pragma unroll
      for (int head = 0; head < kHeads; ++head) {
        sums[head] = device::OnlineSum::empty();
      }
      for (int64_t i = 0; i < num_means; ++i) {
        const int64_t mean = node * params.means_per_node + i;
        const bool present = node >= 0 && mean < params.num_means;
        float products[kHeads] = {};
        for (int64_t first_pair = 0; first_pair < pairs; first_pair += Traits::kPairs) {
          __syncthreads();
          if (first_pair == 0) {
            shared.nodes[threadIdx.x] = present ? static_cast<int32_t>(mean) : -1;
            __syncthreads();
          }
          stage_keys<FullWork, kPack>(params.row, keys, tile, first_pair, shared);
          if (i == 0 || pairs > Traits::kPairs) {
            stage_queries<FullWork>(params.row, queries + first_head * params.row.q.head, num_heads,
                                    num_candidates - 1, first_pair, shared);
          }
          __syncthreads();
          multiply_slice(shared, products);
        }
#pragma unroll
        for (int head = 0; head < kHeads; ++head) {
          if (present) {
            sums[head].add(products[head]);
          }
        }
      }
      if (p < num_candidates) {
        float logs[kHeads];
#pragma unroll
        for (int head = 0; head < kHeads; ++head) {
          logs[head] = sums[head].log_sum();
        }
        store_scores(scores + p * geometry.group + first_head, num_heads, logs);
      }
    }
  }
}

// Splits a row's tiles over enough blocks to fill a large GPU a few times, where there are too
// few rows for that.
inline unsigned score_splits(int64_t num_rows, int64_t num_tiles) {
  constexpr int64_t kEnoughBlocks = 2048;
  const int64_t wanted = (kEnoughBlocks + num_rows - 1) / num_rows;
  return static_cast<unsigned>(std::clamp<int64_t>(wanted, 1, std::clamp<int64_t>(num_tiles, 1, 65535)));
}

template <typename T>
LaunchShape score_launch(const ScoresParams<T>& params) {
  using Traits = ScoresTraits;
  const int64_t tiles = (params.geometry.capacity() + Traits::kTile - 1) / Traits::kTile;
  const int64_t rows = params.geometry.num_rows();
  return {.grid = dim3(static_cast<unsigned>(rows), score_splits(rows, tiles)), .threads = Traits::kThreads};
}

// Whether keys and table are read in whole packs.
template <typename T>
bool wide_loads(const ScoresParams<T>& params) {
  return params.key_dim / 2 % device::kPackOf<T> == 0 && rows_aligned(params.keys) &&
         rows_aligned(params.table);
}

// Calls launch(heads) with the number of heads that a thread computes at a time.
template <typename Launch>
cudaError_t dispatch_heads(int64_t group, Launch&& launch) {
  if (group == 1) {
    return launch(std::integral_constant<int, 1>{});
  }
  if (group == 2) {
    return launch(std::integral_constant<int, 2>{});
  }
  if (group <= 4) {
    return launch(std::integral_constant<int, 4>{});
  }
  return launch(std::integral_constant<int, ScoresTraits::kMaxHeads>{});
}

template <typename Work, typename T>
cudaError_t launch_compute_scores(const ScoresParams<T>& params, cudaStream_t stream) {
  if (params.geometry.num_rows() == 0) {
    return cudaSuccess;
  }
  return dispatch_heads(params.geometry.group, [&](auto heads) {
    const auto kernel = wide_loads(params) ? compute_scores_kernel<Work, T, heads.value, device::kPackOf<T>>
                                           : compute_scores_kernel<Work, T, heads.value, 1>;
    return launch_kernel(kernel, score_launch(params), stream, params);
  });
}

template <typename T>
cudaError_t launch_compute_span_scores(const ComputeSpanScoresParams<T>& params, cudaStream_t stream) {
  if (params.row.geometry.num_rows() == 0) {
    return cudaSuccess;
  }
  return dispatch_heads(params.row.geometry.group, [&](auto heads) {
    const auto kernel = wide_loads(params.row)
                            ? compute_span_scores_kernel<T, heads.value, device::kPackOf<T>>
                            : compute_span_scores_kernel<T, heads.value, 1>;
    return launch_kernel(kernel, score_launch(params.row), stream, params);
  });
}

}  // namespace htree::tree_attention
