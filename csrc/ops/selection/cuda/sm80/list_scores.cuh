// Scores of the leaders' candidates where parents are gathered: one warp per (leader, kv head, run of slots).
#pragma once

#include "host/cuda/kernel_launch.h"
#include "ops/selection/cuda/selection.h"
#include "ops/tree/cuda/launch_params.h"
#include "ops/tree/cuda/sm80/gather.cuh"
#include "ops/tree/cuda/sm80/rotated_query.cuh"
#include "ops/tree/cuda/sm80/running_state.cuh"

namespace htree::tree_attention {

constexpr int kScoreWarps = 4;
constexpr int kScoreStages = 3;

template <int kKeyDim>
struct ScoreRing {
  static constexpr int kCopyBytes = kParentKeyBytes<kKeyDim> + kParentRows * 4;
  static constexpr int kStageBytes = (kCopyBytes + 127) / 128 * 128;
  static constexpr int kSharedBytes = kScoreWarps * kScoreStages * kStageBytes;
};

// Log-sums of the columns (query heads) of accumulators; a tile has 16 children by 8 heads.
template <int kTiles>
struct HeadSums {
  LogSum sums[kTiles][2];

  // Adds a parent's scores without those of the children from `count` on.
  __device__ __forceinline__ void add(const float (&s)[kTiles][4], int count) {
    const int child = threadIdx.x % 32 / 4;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        sums[tile][i].add_pair(child < count ? s[tile][i] : -INFINITY,
                               child + 8 < count ? s[tile][i + 2] : -INFINITY);
      }
    }
  }
  // Writes the sums of all heads to `to` [G]. Whole warps must call.
  __device__ __forceinline__ void write(float2* to, int group) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        LogSum& sum = sums[tile][i];
#pragma unroll
        for (int offset = 4; offset < 32; offset *= 2) {
          const float other_max = __shfl_xor_sync(device::kFullMask, sum.max, offset);
          const float other_sum = __shfl_xor_sync(device::kFullMask, sum.sum, offset);
          sum.add(other_max, other_sum);
        }
        const int head = tile * 8 + lane % 4 * 2 + i;
        if (lane < 4 && head < group) {
          to[head] = make_float2(sum.max, sum.sum);
        }
      }
    }
  }
};

// Grid: x = runs of kScoreWarps leaders, y = batch * kv head, z = runs of kRunSlots slots.
template <typename T, int kKeyDim, int kTiles>
__global__ void __launch_bounds__(kScoreWarps * 32, kTiles == 1 ? 4 : 3)
    list_scores_kernel(ListScoreParams params, int64_t parent_bytes) {
  using Ring = ScoreRing<kKeyDim>;
  extern __shared__ __align__(128) char shared[];
  const GatherParams& p = params.gather;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t list_row = int64_t{blockIdx.x} * kScoreWarps + warp;
  if (list_row >= p.num_lists) {
    return;
  }
  const int64_t query = list_row * p.stride;
  const GatherTask task = gather_task(p, blockIdx.y, query, list_row);
  const int begin = blockIdx.z * kRunSlots;
  const int end = min(task.num_slots, begin + kRunSlots);
  if (begin >= end) {
    return;
  }
  ParentStream<Ring::kCopyBytes, Ring::kStageBytes, kScoreStages> stream(
      p.packed + task.first_parent * parent_bytes, parent_bytes, p.num_parents, task.list, begin, end,
      device::shared_address(shared) + warp * kScoreStages * Ring::kStageBytes);
  RotatedQuery<kKeyDim, kTiles> q;
  q.load(query_rows<T>(p, task, query), p.queries.head, p.group, p.score_scale, p.rope,
         task.num_candidates - 1 - begin * kParentRows);
  const TileAddress<kKeyDim> at;
  const int64_t row_idx = (task.batch * int64_t{p.num_lists} + list_row) * p.num_kv_heads + task.kv_head;
  float* row = params.scores + row_idx * params.score_width * p.group;
  const int counted = task.num_candidates - (params.selection.importance == Importance::kLse ? 0 : 1);
  HeadSums<kTiles> sums;
  for (int slot = begin; slot < end; ++slot) {
    float s[kTiles][4];
    slot_scores(q, at, stream.wait(slot), s);
    q.step_back();
    stream.release();
    sums.add(s, counted - slot * kParentRows);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int candidate = slot * kParentRows + lane / 4 + i / 2 * 8;
        const int head = tile * 8 + lane % 4 * 2 + (i & 1);
        if (candidate < task.num_candidates && head < p.group) {
          row[int64_t{candidate} * p.group + head] = s[tile][i];
        }
      }
    }
  }
  device::wait_copies<0>();
  sums.write(params.sums + (row_idx * params.num_runs + blockIdx.z) * p.group, p.group);
}

template <typename T, int kDim>
cudaError_t launch_list_scores(const ListScoreParams& params, cudaStream_t stream) {
  const GatherParams& p = params.gather;
  const LaunchShape shape{.grid = dim3(num_blocks(p.num_lists, kScoreWarps), p.num_batches * p.num_kv_heads,
                                       static_cast<unsigned>(params.num_runs)),
                          .threads = kScoreWarps * 32,
                          .shared_bytes = ScoreRing<kDim>::kSharedBytes};
  return dispatch_head_tiles(p.group, [&](auto tiles) {
    return launch_kernel(list_scores_kernel<T, kDim, tiles.value>, shape, stream, params,
                         PackedParent<kDim, kDim>::kBytes);
  });
}

}  // namespace htree::tree_attention
