// Scores of a dense top by span means (selection_span), with one pass over the products.
//
// For every (leader, head, node) the kernel writes the sum over the node's span means of
// 2^(score - reference), and for every (leader, head, group of tiles) the reference. The importance of a node
// is then the sum over the heads of these sums times 2^(reference - log-sum), see leader_select.cu,
// and the log-sums follow from the sums of all groups. So every product is computed once, and a span
// mean costs one exponential.
//
// Queries are the rows of the product, and the tiles are ordered so that a thread holds all means of its
// nodes (span_place in span_copies.cuh). A thread block computes 256 rows and one run of groups. The result
// of a row depends on nothing but the row and the run.
#pragma once

#include "host/cuda/kernel_launch.h"
#include "ops/selection/cuda/selection.h"
#include "ops/selection/cuda/sm90/dense_scores.cuh"
#include "ops/tree/cuda/launch_params.h"
#include "ops/tree/cuda/sm90/span_copies.cuh"

namespace htree::tree_attention {

// The sums of a thread's two rows; its columns are 8 i + 2 (lane % 4) + e. A tile holds 2^kRowsLog2
// means of a node.
template <int kRowsLog2>
struct SpanSums {
  static constexpr float kUnset = -1e38f;  // finite, so that -inf - kUnset is -inf
  static constexpr float kLimit = 1e19f;   // of the sum of a tile: sums of a run stay finite
  float reference[2] = {kUnset, kUnset};   // the same in the four lanes of a row
  float sum[2] = {0.f, 0.f};               // of the run, over this lane's columns
  float begun[2] = {0.f, 0.f};             // of a node that continues in later tiles

  // Computes the sums of the nodes of a tile. To save registers, they are stored at `to` as soon as
  // there are four; `to` points to this lane's first node of each row. The sum of a node of 32 means or
  // more is left in total[].
  __device__ __forceinline__ void tile_sums(const float (&s)[64], float* const (&to)[2],
                                            float (&total)[2]) const {
    float pairs[2][4], nodes[2][4];
    total[0] = total[1] = 0.f;
    weigh_scores(s, reference, [&](int step, const float(&x)[8]) {
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        pairs[i / 2 & 1][2 * (step & 1) + i / 4] = x[i] + x[i + 1];
      }
      if (step % 2 == 1) {
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          total[row] += add_quarter(pairs[row], step / 2, to[row], nodes[row]);
        }
      }
    });
  }

  // Adds eight columns, the `quarter`-th of four, and returns their sum. nodes[] keeps sums that
  // are not stored yet.
  __device__ __forceinline__ static float add_quarter(const float (&pairs)[4], int quarter, float* to,
                                                      float (&nodes)[4]) {
    const float fours[2] = {pairs[0] + pairs[1], pairs[2] + pairs[3]};
    const float eight = fours[0] + fours[1];
    if constexpr (kRowsLog2 == 1) {
      store_four(to + 16 * quarter, pairs);
    } else if constexpr (kRowsLog2 == 2) {
      nodes[quarter % 2 * 2] = fours[0];
      nodes[quarter % 2 * 2 + 1] = fours[1];
      if (quarter % 2 == 1) {
        store_four(to + 16 * (quarter / 2), nodes);
      }
    } else if constexpr (kRowsLog2 == 3) {
      nodes[quarter] = eight;
      if (quarter == 3) {
        store_four(to, nodes);
      }
    } else if constexpr (kRowsLog2 == 4) {
      nodes[quarter] = eight;
      if (quarter == 3) {
        *reinterpret_cast<float2*>(to) = make_float2(nodes[0] + nodes[1], nodes[2] + nodes[3]);
      }
    }
    return eight;
  }

  __device__ __forceinline__ static void store_four(float* to, const float (&x)[4]) {
    *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
  }

  // Raises the reference to the largest finite score: the weights of other scores beside an infinite one are
  // then 0, not NaN. All lanes of a row must call together.
  __device__ __forceinline__ void raise(const float (&s)[64], int row, bool wanted) {
    float most = reference[row];
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const float score = s[i / 2 * 4 + 2 * row + i % 2];
      most = fmaxf(most, score == INFINITY ? -INFINITY : score);
    }
    most = fmaxf(most, __shfl_xor_sync(device::kFullMask, most, 1));
    most = fmaxf(most, __shfl_xor_sync(device::kFullMask, most, 2));
    if (wanted) {
      sum[row] = rescaled(sum[row], reference[row] - most);
      begun[row] = rescaled(begun[row], reference[row] - most);
      reference[row] = most;
    }
  }

  __device__ __forceinline__ static bool any_lane_of_row(bool value) {
    const unsigned votes = __ballot_sync(device::kFullMask, value);
    return (votes >> (threadIdx.x % 32 & ~3) & 15u) != 0;
  }

  // Adds a tile to the sums and returns the tile's own sums in total[].
  __device__ __forceinline__ void add(const float (&s)[64], bool first, float* const (&to)[2],
                                      float (&total)[2]) {
    bool beyond[2] = {first, first};
    if (!first) {
      tile_sums(s, to, total);
      beyond[0] = !(total[0] < kLimit);
      beyond[1] = !(total[1] < kLimit);
    }
    if (__any_sync(device::kFullMask, beyond[0] || beyond[1])) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        raise(s, row, any_lane_of_row(beyond[row]));
      }
      tile_sums(s, to, total);
    }
    sum[0] += total[0];
    sum[1] += total[1];
  }

  // Adds a tile's part to the sum of a lane's only node of a group, which has 32 means in each
  // tile of the group.
  __device__ __forceinline__ void add_part(const float (&total)[2], bool ends, float* const (&to)[2]) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      begun[row] += total[row];
      if (ends) {
        *to[row] = begun[row];
        begun[row] = 0.f;
      }
    }
  }
};

// How many of this thread's 32 columns of a row belong to nodes before node `end` of the group:
// these columns come first.
template <int kRowsLog2>
__device__ __forceinline__ int columns_before(int end) {
  constexpr int kRun = kSpanRowsLog2 - kRowsLog2 < 2 ? 1 << (kSpanRowsLog2 - kRowsLog2) : 4;
  const int left = max(end - static_cast<int>(threadIdx.x % 4) * kRun, 0);
  return (left / (4 * kRun) * kRun + min(left % (4 * kRun), kRun)) << kRowsLog2;
}

// The run of groups that a thread block computes.
struct SpanRun {
  int first_group, num_tiles;

  __device__ __forceinline__ SpanRun(const SpanTiling& tiling, int most_rank) {
    const int groups = (most_rank + (1 << tiling.nodes_log2) - 1) >> tiling.nodes_log2;
    first_group = blockIdx.z << tiling.run_log2;
    num_tiles = (min(groups, first_group + (1 << tiling.run_log2)) - first_group) << tiling.tiles_log2;
  }
};

// Keeps the scores of nodes before the row's diagonal block and sets the others to -inf.
// For `end` see columns_before.
template <int kRowsLog2>
__device__ __forceinline__ void mask_nodes(float (&s)[64], const int (&end)[2]) {
  const int columns[2] = {columns_before<kRowsLog2>(end[0]), columns_before<kRowsLog2>(end[1])};
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    s[i] = i / 4 * 2 + i % 2 < columns[i / 2 & 1] ? s[i] : -INFINITY;
  }
}

// Where a thread writes the results of its two rows (leader, head), group after group.
template <int kRowsLog2>
struct SpanOutputs {
  static constexpr int kGroupNodes = 1 << (kSpanTileRowsLog2 - kRowsLog2);
  float* nodes[2];       // this lane's first node of the group
  float* references[2];  // that of the group
  float2* runs[2];
  int group;

  // `list_rows` are (batch, leader, kv head), `heads` those of the kv head.
  __device__ __forceinline__ SpanOutputs(const SpanScores& to, const SpanRun& run,
                                         const int64_t (&list_rows)[2], const int (&heads)[2], int group)
      : group(group) {
    const int lane_node = static_cast<int>(threadIdx.x % 4) * min(kGroupNodes / 4, 4);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      nodes[i] = to.sums + (list_rows[i] * group + heads[i]) * to.width +
                 int64_t{run.first_group} * kGroupNodes + lane_node;
      references[i] = to.references + (list_rows[i] * to.num_groups + run.first_group) * group + heads[i];
      runs[i] = to.runs + (list_rows[i] * to.num_runs + blockIdx.z) * group + heads[i];
    }
  }

  __device__ __forceinline__ void end_group(const float (&reference)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (threadIdx.x % 4 == 0) {
        *references[i] = reference[i];
      }
      nodes[i] += kGroupNodes;
      references[i] += group;
    }
  }

  // Writes the run's sum of row i over all lanes, relative to `reference`; an infinite sum
  // is relative to infinity.
  __device__ __forceinline__ void end_run(int i, float reference, float sum) const {
    sum += __shfl_xor_sync(device::kFullMask, sum, 1);
    sum += __shfl_xor_sync(device::kFullMask, sum, 2);
    if (threadIdx.x % 4 == 0) {
      *runs[i] = make_float2(sum == INFINITY ? INFINITY : reference, sum);
    }
  }
};

// The grid is that of ScoreTask, with z = runs of groups.
template <typename T, int kDim, int kRowsLog2>
__global__ void __launch_bounds__(kScoreThreads, 1) span_scores_kernel(SpanScoreParams params) {
#if HTREE_SM90A
  extern __shared__ __align__(128) char raw[];
  ScoreShared<kDim>& shared = *aligned_shared<ScoreShared<kDim>>(raw);
  const GatherParams& p = params.gather;
  const ScoreTask task(p);
  const SpanTiling& tiling = params.tiles.tiling;
  const SpanRun run(tiling, task.most_rank);
  if (task.most_rank < p.list_width || run.num_tiles <= 0) {
    return;  // every candidate is selected, or none of them is in this run
  }
  const int64_t first_tile =
      task.head_index * params.tiles.num_tiles + (int64_t{run.first_group} << tiling.tiles_log2);
  KeyRing<ScoreShared<kDim>> ring{shared, params.tiles.keys + first_tile * kTopTileBytes<kDim>,
                                  run.num_tiles};
  ring.start();
  const auto list_of = [&](int row) {
    return min(task.first_list + (row >> task.group_log2), task.last_list);
  };
  const auto head_of = [&](int row) { return row & (p.group - 1); };
  bool scaled = scaled_tile(params.tiles.scaled + first_tile, run.num_tiles);
  scaled |= rotate_queries<T, kDim, kScoreRows, kScoreThreads, 3>(
      shared.queries, shared.factors, p, threadIdx.x, [&](int row) {
        const int list = list_of(row);
        return query_row<T>(p, task.batch, task.kv_head, int64_t{list} * p.stride, head_of(row),
                            task.rank(p, list));
      });
  scaled = __syncthreads_or(scaled);

  const int group_idx = threadIdx.x / 128, lane = threadIdx.x % 32;
  const int first_row = threadIdx.x / 32 * 16 + lane / 4;
  const int ranks[2] = {task.rank(p, list_of(first_row)), task.rank(p, list_of(first_row + 8))};
  const auto list_row = [&](int row) {
    return (int64_t{task.batch} * p.num_lists + list_of(row)) * p.num_kv_heads + task.kv_head;
  };
  SpanOutputs<kRowsLog2> outputs(params.scores, run, {list_row(first_row), list_row(first_row + 8)},
                                 {head_of(first_row), head_of(first_row + 8)}, p.group);
  const uint64_t queries =
      device::k_major_descriptor<device::Swizzle::k128>(shared.queries + group_idx * 64 * kPanelRowBytes);
  const bool joint = params.selection.importance == Importance::kExpJoint;
  SpanSums<kRowsLog2> sums;
  RowMaxima maxima;
  float s[64];
  int first_node = run.first_group * outputs.kGroupNodes;  // the first node of the group
  // The warpgroups issue their products one after another, so that some compute exponentials while others
  // wait for products.
  if (group_idx == kScoreGroups - 1) {
    device::named_barrier_arrive(kIssueBarrier, 256);
  }
  for (int tile = 0; tile < run.num_tiles; ++tile) {
    ring.wait(tile);
    const uint64_t keys =
        device::k_major_descriptor<device::Swizzle::k128>(shared.keys[tile % kTopScoreStages]);
    device::named_barrier_sync(kIssueBarrier + group_idx, 256);
    device::wgmma_fence();
    multiply_panels<kDim, kScoreRows, kDenseTileNodes>(s, queries, keys);
    device::wgmma_commit();
    device::named_barrier_arrive(kIssueBarrier + (group_idx + 1) % kScoreGroups, 256);
    device::wgmma_wait<0>();
    ring.release(tile);
    if (scaled) {
      undo_powers(s, shared.factors + first_row,
                  params.tiles.scales + (first_tile + tile) * kDenseTileNodes + lane % 4 * 2);
    }
    if (first_node + outputs.kGroupNodes > task.least_rank) {
      mask_nodes<kRowsLog2>(s, {ranks[0] - first_node, ranks[1] - first_node});
    }
    if (joint) {
      maxima.add(s);
    }
    float total[2];
    sums.add(s, tile == 0, outputs.nodes, total);
    bool ends = true;
    if constexpr (kRowsLog2 == kSpanRowsLog2) {
      ends = (tile + 1 & ((1 << tiling.tiles_log2) - 1)) == 0;
      sums.add_part(total, ends, outputs.nodes);
    }
    if (ends) {
      outputs.end_group(sums.reference);
      first_node += outputs.kGroupNodes;
    }
  }
  if (group_idx == 0) {
    device::named_barrier_sync(kIssueBarrier, 256);
  }
  outputs.end_run(0, joint ? maxima.finish(0) : sums.reference[0], sums.sum[0]);
  outputs.end_run(1, joint ? maxima.finish(1) : sums.reference[1], sums.sum[1]);
#else
  __trap();
#endif
}

template <typename T, int kDim>
cudaError_t launch_span_scores(const SpanScoreParams& params, cudaStream_t stream) {
  const GatherParams& p = params.gather;
  const LaunchShape shape{
      .grid = dim3(num_blocks(p.num_lists, kScoreRows / p.group) * static_cast<unsigned>(p.num_kv_heads),
                   p.num_batches, static_cast<unsigned>(params.scores.num_runs)),
      .threads = kScoreThreads,
      .shared_bytes = kScoreSharedBytes<kDim>};
  const auto launch = [&](auto kernel) { return launch_kernel(kernel, shape, stream, params); };
  switch (params.tiles.tiling.rows_log2) {
    case 1:
      return launch(span_scores_kernel<T, kDim, 1>);
    case 2:
      return launch(span_scores_kernel<T, kDim, 2>);
    case 3:
      return launch(span_scores_kernel<T, kDim, 3>);
    case 4:
      return launch(span_scores_kernel<T, kDim, 4>);
    case kSpanRowsLog2:
      return launch(span_scores_kernel<T, kDim, kSpanRowsLog2>);
    default:
      refuse_shape("2^" + std::to_string(params.tiles.tiling.rows_log2) + " span means of a node in a tile");
  }
}

}  // namespace htree::tree_attention
