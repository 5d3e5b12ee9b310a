// What the kernels of forward/dense_rows/ and backward/dense_rows/ share: their warpgroups, and what silences the last
// tile of a run. sm_90a.
#pragma once

#include "ops/sparse_attention/cuda/sm90/forward/dense_products.cuh"
#include "ops/tree/plan/dense_rows.h"

namespace htree::tree_attention {

constexpr int kRowsGroups = 2;  // consumer warpgroups
constexpr int kRowsConsumers = 128 * kRowsGroups;
constexpr int kRowsThreads = kRowsConsumers + 128;
constexpr int kTurnBarrier = 2;  // barriers 2 and 3: warpgroup 0 or 1 may issue its products

static_assert((1 << run_tokens_log2(1)) == kDenseTileNodes && kRunRows == 64 * kRowsGroups);

// Zeroes what a weight of 0 would not silence in the last tile of values: its rows behind the last token of the task,
// and infinities and NaN in the rows of the task's own tokens, which some of its rows do not see. All threads that
// multiply call.
template <typename T, int kDim>
__device__ __forceinline__ void silence_values(char* tile, int first, int end) {
  constexpr int kChunks = kDim / 8;
  for (int i = threadIdx.x; i < (kDenseTileNodes - first) * kChunks; i += kRowsConsumers) {
    const int row = first + i / kChunks;
    uint4* at = reinterpret_cast<uint4*>(tile + panel_offset(kDenseTileNodes, row, i % kChunks));
    const uint4 chunk = *at;
    uint32_t words[4] = {chunk.x, chunk.y, chunk.z, chunk.w};
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (row >= end || infinite_or_nan<T>(words[j / 2], j % 2)) {
        words[j / 2] &= j % 2 ? 0x0000ffffu : 0xffff0000u;
      }
    }
    *at = make_uint4(words[0], words[1], words[2], words[3]);
  }
  device::fence_async_shared();
  device::named_barrier_sync(kConsumerBarrier, kRowsConsumers);
}

}  // namespace htree::tree_attention
