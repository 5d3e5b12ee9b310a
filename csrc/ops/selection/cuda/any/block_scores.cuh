// Block scores for every dtype and block size: lanes side by side take the tokens of a block, each for kGeneralLeaders
// leaders. A product is one chain of multiply-adds over d, so that its bits do not depend on sizes.
#pragma once

#include "device/numeric.cuh"
#include "device/pack.cuh"
#include "device/reduce.cuh"
#include "host/cuda/kernel_launch.h"
#include "ops/selection/cuda/any/block_documents.cuh"
#include "ops/selection/plan/block_launch.h"

namespace htree::tree_attention {

struct BlockScoreTraits {
  static constexpr int kThreads = 128;
  static constexpr int kLeaders = static_cast<int>(kGeneralLeaders);
  static constexpr int kMostWidth = 128;
};

// sums[r] = <key, query r>, of the queries in shared memory.
template <typename T>
__device__ __forceinline__ void multiply_token(const T* key, int32_t d,
                                               const float (*queries)[BlockScoreTraits::kLeaders],
                                               float (&sums)[BlockScoreTraits::kLeaders]) {
  using Traits = BlockScoreTraits;
  constexpr int kPack = device::kPackOf<T>;
  for (int32_t first = 0; first < d; first += kPack) {
    const auto pack = device::load_pack<kPack>(key + first);
#pragma unroll
    for (int e = 0; e < kPack; ++e) {
      const float value = device::to_acc(pack[e]);
#pragma unroll
      for (int r = 0; r < Traits::kLeaders; r += 4) {
        const auto query = device::load_pack<4>(&queries[first + e][r]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sums[r + i] = fmaf(value, query[i], sums[r + i]);
        }
      }
    }
  }
}

// Scores of the blocks before the last leader's own, for leaders of one sequence, whose queries are in shared memory.
// `lanes` lanes, a power of two, share a block.
template <typename T>
__device__ __forceinline__ void score_blocks(const BlockScoreParams<T>& params, const BlockDocument& document,
                                             const LeaderRange& leaders, int lanes,
                                             const float (*queries)[BlockScoreTraits::kLeaders]) {
  using Traits = BlockScoreTraits;
  const BlockChunk& chunk = params.chunk;
  const int32_t head = static_cast<int32_t>(blockIdx.z);
  const T* keys = params.key.data + document.key + (chunk.first_head + head) * params.key.head;
  const int32_t num_blocks = diagonal_block(chunk, document, leaders.end - 1);
  const int groups = Traits::kThreads / lanes;
  const int group = static_cast<int>(threadIdx.x) / lanes, lane = static_cast<int>(threadIdx.x) % lanes;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * groups; first < num_blocks;
       first += static_cast<int64_t>(gridDim.x) * groups) {
    const int64_t block = first + group;
    float best[Traits::kLeaders];
#pragma unroll
    for (int r = 0; r < Traits::kLeaders; ++r) {
      best[r] = device::negative_infinity<float>();
    }
    for (int32_t token = lane; block < num_blocks && token < chunk.block_size; token += lanes) {
      float sums[Traits::kLeaders] = {};
      multiply_token(keys + (block * chunk.block_size + token) * params.key.row, params.d, queries, sums);
#pragma unroll
      for (int r = 0; r < Traits::kLeaders; ++r) {
        best[r] = fmaxf(best[r], sums[r]);  // NaN loses
      }
    }
    for (int offset = lanes / 2; offset > 0; offset /= 2) {
#pragma unroll
      for (int r = 0; r < Traits::kLeaders; ++r) {
        best[r] = fmaxf(best[r], __shfl_xor_sync(device::kFullMask, best[r], offset));
      }
    }
#pragma unroll
    for (int r = 0; r < Traits::kLeaders; ++r) {
      if (lane == r % lanes && block < num_blocks && leaders.begin + r < leaders.end) {
        score_row(chunk, head, document.first_slot + leaders.begin + r)[block] = best[r];
      }
    }
  }
}

// Grid: x = splits of the blocks, y = tiles of leaders, z = heads.
template <typename T>
__global__ void __launch_bounds__(BlockScoreTraits::kThreads)
    block_scores_kernel(const BlockScoreParams<T> params, int lanes) {
  using Traits = BlockScoreTraits;
  __shared__ __align__(16) float queries[Traits::kMostWidth][Traits::kLeaders];
  const BlockChunk& chunk = params.chunk;
  const int32_t first = chunk.first_slot + static_cast<int32_t>(blockIdx.y) * Traits::kLeaders;
  const int32_t last = min(first + Traits::kLeaders, chunk.first_slot + chunk.num_slots);
  for (int i = find_document(chunk, first); i < chunk.num_documents; ++i) {
    const BlockDocument document = chunk.documents[i];
    if (document.first_slot >= last) {
      break;
    }
    const LeaderRange leaders = leaders_among(document, first, last);
    if (leaders.is_empty() || document.broken) {
      continue;
    }
    __syncthreads();
    const T* rows = params.query.data + document.query +
                    (chunk.first_head + static_cast<int64_t>(blockIdx.z)) * params.query.head;
    for (int item = threadIdx.x; item < params.d * Traits::kLeaders; item += Traits::kThreads) {
      const int c = item % params.d, r = item / params.d;
      const int64_t leader = leaders.begin + r;
      queries[c][r] =
          leader < leaders.end ? device::to_acc(rows[leader * chunk.stride * params.query.row + c]) : 0.0f;
    }
    __syncthreads();
    score_blocks(params, document, leaders, lanes, queries);
  }
}

template <typename T>
cudaError_t launch_block_scores(const BlockScoreParams<T>& params, cudaStream_t stream) {
  using Traits = BlockScoreTraits;
  int lanes = 1;
  while (lanes < params.chunk.block_size && lanes < device::kWarpSize) {
    lanes *= 2;
  }
  const LaunchShape shape{
      .grid = dim3(static_cast<unsigned>(params.splits),
                   static_cast<unsigned>(ceil_div(params.chunk.num_slots, Traits::kLeaders)),
                   static_cast<unsigned>(params.chunk.num_heads)),
      .threads = Traits::kThreads};
  return launch_kernel(block_scores_kernel<T>, shape, stream, params, lanes);
}

}  // namespace htree::tree_attention
