// The second pass over a selection at the top: importances from scores and references.
//
// Keys are the rows of the product and a column is (run of 8 leaders, head, leader in the run): a thread
// holds all heads of its (key, leader) pairs, and the sum over the heads in order is additions of its own
// registers, whatever the tile. Warpgroup = (half of the keys, half of the columns).
#pragma once

#include "ops/tree_attention/cuda/select/dense_scores.cuh"

namespace htree::tree_attention {

// Grid: see ScoreTask. kGroup: G.
template <typename T, int kDim, int kGroup>
__global__ void __launch_bounds__(kScoreThreads, 1) top_importance_kernel(TopImportanceParams all) {
#if HTREE_SM90A
  extern __shared__ __align__(128) char raw[];
  ScoreShared<kDim>& shared = *aligned_shared<ScoreShared<kDim>>(raw);
  const TopReferenceParams& params = all.reference;
  const GatherParams& p = params.gather;
  const ScoreTask task(p);
  if (task.most_rank < p.list_width) {
    return;
  }
  const int num_tiles = (task.most_rank + kTopTileNodes - 1) / kTopTileNodes;
  const int64_t first_tile = task.head_index * params.tiles.num_tiles;
  KeyRing<kDim> ring{shared, params.tiles.keys + first_tile * kTopTileBytes<kDim>, num_tiles};
  ring.start();
  const auto list_of = [&](int column) {
    return min(task.first_list + column / (8 * kGroup) * 8 + column % 8, task.last_list);
  };
  bool scaled = scaled_tile(params.tiles.scaled + first_tile, num_tiles);
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
  // block j of 8 columns: head j % G of the run j / G
  float lowered[32];
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const int column = first_column + i / 2 * 8 + i % 2;
    const int64_t at = int64_t{list_of(column)} * p.num_kv_heads + task.kv_head;
    lowered[i] = params.references[task.batch * params.reference_batch + at * kGroup + column / 8 % kGroup];
  }
  if (params.importance == Importance::kExpJoint) {
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
  // leaders of this thread: first_list + 8 * run (+ 1), at most the last
  const int first_list = task.first_list + first_column / (8 * kGroup) * 8 + first_column % 8;
  const uint32_t row_stride = static_cast<uint32_t>(p.num_kv_heads * all.width);
  float* rows =
      all.importances + first_key +
      ((int64_t{task.batch} * p.num_lists + task.first_list) * p.num_kv_heads + task.kv_head) * all.width;

  const uint64_t queries = device::k_major_descriptor<device::Swizzle::k128>(
      shared.queries + group_idx / 2 * 128 * kPanelRowBytes);
  float s[64];
  for (int tile = 0; tile < num_tiles; ++tile) {
    ring.wait(tile);
    const uint64_t keys = device::k_major_descriptor<device::Swizzle::k128>(
        shared.keys[tile % kTopScoreStages] + key_half * 64 * kPanelRowBytes);
    device::wgmma_fence();
    multiply_panels<kDim, kTopTileNodes, kScoreRows>(s, keys, queries);
    device::wgmma_commit();
    device::wgmma_wait<0>();
    ring.release(tile);
    if (scaled) {
      const float* scales = params.tiles.scales + (first_tile + tile) * kTopTileNodes + first_key;
      const float key_scales[2] = {__ldg(scales), __ldg(scales + 8)};
#pragma unroll
      for (int i = 0; i < 64; ++i) {
        s[i] *= key_scales[i / 2 & 1];
        s[i] *= shared.factors[first_column + i / 4 * 8 + i % 2];
      }
    }
    // i: half of the rows, leader of the pair
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float importance = 0.f;
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        const float weight = device::exp2_flushed(s[4 * j + i] - lowered[2 * j + i % 2]);
        importance = j % kGroup == 0 ? weight : importance + weight;
        if ((j + 1) % kGroup == 0) {
          const int list = min(first_list + j / kGroup * 8 + i % 2, task.last_list) - task.first_list;
          rows[list * row_stride + tile * kTopTileNodes + i / 2 * 8] = importance;
        }
      }
    }
  }
#else
  __trap();
#endif
}

}  // namespace htree::tree_attention
