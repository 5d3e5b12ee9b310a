// Selection at a dense top in two passes over the scores: references, then importances.
#pragma once

#include "device/sm90/pdl.cuh"
#include "host/cuda/kernel_launch.h"
#include "ops/selection/cuda/selection.h"
#include "ops/selection/cuda/sm90/dense_scores.cuh"
#include "ops/tree/cuda/launch_params.h"

namespace htree::tree_attention {

// ---- references
//
// The first pass of a selection at the top finds the reference of each leader and head, which is what the
// second pass subtracts from scores.
//
// Queries are the rows of the product, so that a thread sums two rows over its own columns, and the four
// lanes of a row combine their sums once at the end. The reference that a row's sums are relative to changes
// only when they would leave the range of fp32. It depends on the row alone, so no other query changes a bit.

// The sums of a thread's two rows; its columns are 8 j + 2 (lane % 4) + c.
struct RowSums {
  static constexpr float kUnset = -1e38f;  // finite, so that -inf - kUnset is -inf
  static constexpr float kLimit = 1e19f;   // of the sum of a tile: sums of 16384 candidates stay finite
  float reference[2] = {kUnset, kUnset};
  float sum[2] = {0.f, 0.f};

  __device__ __forceinline__ void tile_sums(const float (&s)[64], float (&total)[2]) const {
    float even[2] = {0.f, 0.f}, odd[2] = {0.f, 0.f};
    weigh_scores(s, reference, [&](int, const float(&x)[8]) {
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        even[i / 2 & 1] += x[i];
        odd[i / 2 & 1] += x[i + 1];
      }
    });
    total[0] = even[0] + odd[0];
    total[1] = even[1] + odd[1];
  }

  __device__ __forceinline__ void raise(const float (&s)[64], int row) {
    float most = reference[row];
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      most = fmaxf(most, fmaxf(s[4 * j + 2 * row], s[4 * j + 2 * row + 1]));
    }
    if (most < INFINITY) {
      sum[row] = rescaled(sum[row], reference[row] - most);
      reference[row] = most;
    }
  }

  __device__ __forceinline__ void add(const float (&s)[64], bool first) {
    float total[2];
    bool beyond[2] = {first, first};
    if (!first) {
      tile_sums(s, total);
      beyond[0] = !(total[0] < kLimit);
      beyond[1] = !(total[1] < kLimit);
    }
    if (__any_sync(device::kFullMask, beyond[0] || beyond[1])) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        if (beyond[row]) {
          raise(s, row);
        }
      }
      tile_sums(s, total);
    }
    sum[0] += total[0];
    sum[1] += total[1];
  }

  // Returns the reference of a row, in every lane of the row.
  __device__ __forceinline__ float finish(int row) {
#pragma unroll
    for (int offset = 1; offset < 4; offset *= 2) {
      const float other = __shfl_xor_sync(device::kFullMask, reference[row], offset);
      const float other_sum = __shfl_xor_sync(device::kFullMask, sum[row], offset);
      const float most = fmaxf(reference[row], other);
      sum[row] = rescaled(sum[row], reference[row] - most) + rescaled(other_sum, other - most);
      reference[row] = most;
    }
    return sum[row] == 0.f ? INFINITY : reference[row] + log2f(sum[row]);
  }
};

// The grid is that of ScoreTask with kRows rows per block. A row's numbers do not depend on kRows.
template <typename T, int kDim, int kRows>
__global__ void __launch_bounds__(kRows * 2, 1) dense_references_kernel(DenseReferenceParams params) {
#if HTREE_SM90A
  using Shared = ScoreShared<kDim, kRows>;
  constexpr int kThreads = Shared::kThreads, kGroups = kThreads / 128;
  extern __shared__ __align__(128) char raw[];
  Shared& shared = *aligned_shared<Shared>(raw);
  const GatherParams& p = params.gather;
  const ScoreTask task(p, kRows);
  device::pdl_wait();
  if (threadIdx.x == 0) {
    device::pdl_launch_dependents();
  }
  if (task.selects_all(p)) {
    return;
  }
  const int extra = params.selection.importance == Importance::kLse ? 1 : 0;  // the query's diagonal block
  const int most = task.most_rank + extra, least = task.least_rank + extra;
  const int num_tiles = (most + kDenseTileNodes - 1) / kDenseTileNodes;
  const int64_t first_tile = task.head_index * params.tiles.num_tiles;
  KeyRing<Shared> ring{shared, params.tiles.keys + first_tile * kTopTileBytes<kDim>, num_tiles};
  ring.start();
  const auto list_of = [&](int row) {
    return min(task.first_list + (row >> task.group_log2), task.last_list);
  };
  bool scaled = scaled_tile(params.tiles.flags + first_tile, num_tiles);
  scaled |= rotate_queries<T, kDim, kRows, kThreads, 3>(
      shared.queries, shared.factors, p, threadIdx.x, [&](int row) {
        const int list = list_of(row);
        return query_row<T>(p, task.batch, task.kv_head, int64_t{list} * p.stride, row & (p.group - 1),
                            task.rank(p, list));
      });
  scaled = __syncthreads_or(scaled);

  const int group_idx = threadIdx.x / 128, lane = threadIdx.x % 32;
  const int first_row = threadIdx.x / 32 * 16 + lane / 4;
  const int ranks[2] = {task.rank(p, list_of(first_row)) + extra,
                        task.rank(p, list_of(first_row + 8)) + extra};
  const uint64_t queries =
      device::k_major_descriptor<device::Swizzle::k128>(shared.queries + group_idx * 64 * kPanelRowBytes);
  const bool joint = params.selection.importance == Importance::kExpJoint;
  RowSums sums;
  RowMaxima maxima;
  float s[64];
  // The warpgroups issue their products one after another, so that some compute exponentials while others
  // wait for products.
  if (group_idx == kGroups - 1) {
    device::named_barrier_arrive(kIssueBarrier, 256);
  }
  for (int tile = 0; tile < num_tiles; ++tile) {
    ring.wait(tile);
    const uint64_t keys =
        device::k_major_descriptor<device::Swizzle::k128>(shared.keys[tile % kTopScoreStages]);
    device::named_barrier_sync(kIssueBarrier + group_idx, 256);
    device::wgmma_fence();
    multiply_panels<kDim, kRows, kDenseTileNodes>(s, queries, keys);
    device::wgmma_commit();
    device::named_barrier_arrive(kIssueBarrier + (group_idx + 1) % kGroups, 256);
    device::wgmma_wait<0>();
    ring.release(tile);
    const int first_column = tile * kDenseTileNodes + lane % 4 * 2;
    if (scaled) {
      undo_powers(s, shared.factors + first_row,
                  params.tiles.scales + first_tile * kDenseTileNodes + first_column);
    }
    if ((tile + 1) * kDenseTileNodes > least) {
#pragma unroll
      for (int i = 0; i < 64; ++i) {
        s[i] = first_column + i / 4 * 8 + i % 2 < ranks[i / 2 & 1] ? s[i] : -INFINITY;
      }
    }
    if (joint) {
      maxima.add(s);
    } else {
      sums.add(s, tile == 0);
    }
  }
  if (group_idx == 0) {
    device::named_barrier_sync(kIssueBarrier, 256);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float result = joint ? maxima.finish(i) : sums.finish(i);
    const int row = first_row + 8 * i;
    const int64_t at = int64_t{list_of(row)} * p.num_kv_heads + task.kv_head;
    if (lane % 4 == 0) {
      params.references[task.batch * params.reference_batch + at * p.group + (row & (p.group - 1))] = result;
    }
  }
#else
  __trap();
#endif
}

// ---- importances
//
// The second pass of a selection at the top computes importances from scores and references.
//
// Keys are the rows of the product, and a column is (run of 8 leaders, head, leader in the run). A thread
// therefore holds all heads of its (key, leader) pairs and adds them in the order of the heads, whatever the
// tile. A warpgroup computes half of the keys times half of the columns.

// Replaces the references of a leader's heads by the largest one, for kExpJoint.
template <int kGroup>
__device__ __forceinline__ void join_references(float (&lowered)[32]) {
#pragma unroll
  for (int i = 0; i < 16 / kGroup; ++i) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float most = -INFINITY;
#pragma unroll
      for (int j = 0; j < kGroup; ++j) {
        most = fmaxf(most, lowered[2 * (i * kGroup + j) + e]);
      }
#pragma unroll
      for (int j = 0; j < kGroup; ++j) {
        lowered[2 * (i * kGroup + j) + e] = most == -INFINITY ? INFINITY : most;
      }
    }
  }
}

// Writes the importances of a tile of keys, which sum 2^(score - reference) over the heads, in order.
template <int kGroup>
__device__ __forceinline__ void store_importances(const float (&s)[64], const float (&lowered)[32],
                                                  float* rows, uint32_t row_stride, int first_list,
                                                  const ScoreTask& task, int tile) {
  // i is (half of the rows, leader of the pair)
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float importance = 0.f;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const float weight = device::exp2_flushed(s[4 * j + i] - lowered[2 * j + i % 2]);
      importance = j % kGroup == 0 ? weight : importance + weight;
      if ((j + 1) % kGroup == 0) {
        const int list = min(first_list + j / kGroup * 8 + i % 2, task.last_list) - task.first_list;
        rows[list * row_stride + tile * kDenseTileNodes + i / 2 * 8] = importance;
      }
    }
  }
}

// The grid is that of ScoreTask, with z = blocks that share the tiles of the same rows; kGroup is G.
template <typename T, int kDim, int kGroup>
__global__ void __launch_bounds__(kScoreThreads, 1) dense_importance_kernel(DenseImportanceParams all) {
#if HTREE_SM90A
  extern __shared__ __align__(128) char raw[];
  ScoreShared<kDim>& shared = *aligned_shared<ScoreShared<kDim>>(raw);
  const DenseReferenceParams& params = all.reference;
  const GatherParams& p = params.gather;
  const ScoreTask task(p);
  device::pdl_wait();
  if (threadIdx.x == 0) {
    device::pdl_launch_dependents();
  }
  if (task.selects_all(p)) {
    return;
  }
  const int all_tiles = (task.most_rank + kDenseTileNodes - 1) / kDenseTileNodes;
  const int part_tiles = (all_tiles + static_cast<int>(gridDim.z) - 1) / static_cast<int>(gridDim.z);
  const int before = static_cast<int>(blockIdx.z) * part_tiles;
  const int num_tiles = min(part_tiles, all_tiles - before);
  if (num_tiles <= 0) {
    return;
  }
  const int64_t first_tile = task.head_index * params.tiles.num_tiles + before;
  KeyRing<ScoreShared<kDim>> ring{shared, params.tiles.keys + first_tile * kTopTileBytes<kDim>, num_tiles};
  ring.start();
  const auto list_of = [&](int column) {
    return min(task.first_list + column / (8 * kGroup) * 8 + column % 8, task.last_list);
  };
  bool scaled = scaled_tile(params.tiles.flags + first_tile, num_tiles);
  scaled |= rotate_queries<T, kDim, kScoreRows, kScoreThreads, 3>(
      shared.queries, shared.factors, p, threadIdx.x, [&](int column) {
        const int list = list_of(column);
        return query_row<T>(p, task.batch, task.kv_head, int64_t{list} * p.stride, column / 8 % kGroup,
                            task.rank(p, list));
      });
  scaled = __syncthreads_or(scaled);

  const int group_idx = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const int key_half = group_idx % 2, first_column = group_idx / 2 * 128 + lane % 4 * 2;
  const int first_key = key_half * 64 + warp * 16 + lane / 4;
  // Block j of 8 columns has head j % G of run j / G.
  float lowered[32];
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const int column = first_column + i / 2 * 8 + i % 2;
    const int64_t at = int64_t{list_of(column)} * p.num_kv_heads + task.kv_head;
    lowered[i] = params.references[task.batch * params.reference_batch + at * kGroup + column / 8 % kGroup];
  }
  if (params.selection.importance == Importance::kExpJoint) {
    join_references<kGroup>(lowered);
  }
  // The leaders of this thread are first_list + 8 * run (+ 1), but at most the last one.
  const int first_list = task.first_list + first_column / (8 * kGroup) * 8 + first_column % 8;
  const uint32_t row_stride = static_cast<uint32_t>(p.num_kv_heads * all.width);
  float* rows =
      all.importances + before * kDenseTileNodes + first_key +
      ((int64_t{task.batch} * p.num_lists + task.first_list) * p.num_kv_heads + task.kv_head) * all.width;

  const uint64_t queries = device::k_major_descriptor<device::Swizzle::k128>(
      shared.queries + group_idx / 2 * 128 * kPanelRowBytes);
  float s[64];
  for (int tile = 0; tile < num_tiles; ++tile) {
    ring.wait(tile);
    const uint64_t keys = device::k_major_descriptor<device::Swizzle::k128>(
        shared.keys[tile % kTopScoreStages] + key_half * 64 * kPanelRowBytes);
    device::wgmma_fence();
    multiply_panels<kDim, kDenseTileNodes, kScoreRows>(s, keys, queries);
    device::wgmma_commit();
    device::wgmma_wait<0>();
    ring.release(tile);
    if (scaled) {
      const float* scales = params.tiles.scales + (first_tile + tile) * kDenseTileNodes + first_key;
      const float key_scales[2] = {__ldg(scales), __ldg(scales + 8)};
#pragma unroll
      for (int i = 0; i < 64; ++i) {
        s[i] *= key_scales[i / 2 & 1];
        s[i] *= shared.factors[first_column + i / 4 * 8 + i % 2];
      }
    }
    store_importances<kGroup>(s, lowered, rows, row_stride, first_list, task, tile);
  }
#else
  __trap();
#endif
}

template <int kDim, int kRows>
LaunchShape score_launch(const GatherParams& p) {
  const unsigned runs = num_blocks(p.num_lists, kRows / p.group);
  return {.grid = dim3(runs * static_cast<unsigned>(p.num_kv_heads), p.num_batches),
          .threads = ScoreShared<kDim, kRows>::kThreads,
          .shared_bytes = kScoreSharedBytes<kDim, kRows>,
          .pdl = true};
}

template <typename T, int kDim>
cudaError_t launch_dense_references(const DenseReferenceParams& params, cudaStream_t stream) {
  const GatherParams& p = params.gather;
  int num_sms = 0;
  if (const cudaError_t error = device_attribute(cudaDevAttrMultiProcessorCount, num_sms);
      error != cudaSuccess) {
    return error;
  }
  const int64_t heads = int64_t{p.num_batches} * p.num_kv_heads;
  const auto launch = [&](auto rows) {
    return launch_kernel(dense_references_kernel<T, kDim, rows.value>, score_launch<kDim, rows.value>(p),
                         stream, params);
  };
  return reference_rows(int64_t{p.num_lists} * p.group, heads, num_sms) == kScoreRows
             ? launch(IntTag<kScoreRows>{})
             : launch(IntTag<kScoreRows / 2>{});
}

template <typename T, int kDim>
cudaError_t launch_dense_importances(const DenseImportanceParams& params, cudaStream_t stream) {
  const GatherParams& p = params.reference.gather;
  int num_sms = 0;
  if (const cudaError_t error = device_attribute(cudaDevAttrMultiProcessorCount, num_sms);
      error != cudaSuccess) {
    return error;
  }
  LaunchShape shape = score_launch<kDim, kScoreRows>(p);
  const int64_t last_rank = (p.t0 + int64_t{p.num_lists - 1} * p.stride) / p.node_span;
  shape.grid.z = static_cast<unsigned>(
      importance_parts(int64_t{shape.grid.x} * shape.grid.y, ceil_div(last_rank, kDenseTileNodes), num_sms));
  return dispatch_dense_group(p.group, [&](auto group) {
    return launch_kernel(dense_importance_kernel<T, kDim, group.value>, shape, stream, params);
  });
}

}  // namespace htree::tree_attention
