// One softmax step of tree attention over the candidates of a layer that are not selected:
// docs/semantics/tree_attention.md §1.5, §1.7. One warp per (token, kv head) gathers the parents of its own
// list. S^T = K' q^T has children as rows and query heads as columns; then O^T += V^T P^T.
#pragma once

#include "host/cuda/kernel_launch.h"
#include "ops/sparse_attention/cuda/attend.h"
#include "ops/sparse_attention/cuda/sm80/forward/running_softmax.cuh"
#include "ops/tree/cuda/launch_params.h"
#include "ops/tree/cuda/sm80/gather.cuh"
#include "ops/tree/cuda/sm80/rotated_query.cuh"

namespace htree::tree_attention {

constexpr int kAttendWarps = 4;

template <int kKeyDim, int kValueDim>
struct PerQueryRing {
  static constexpr int kCopyBytes = PackedParent<kKeyDim, kValueDim>::kBytes;
  static constexpr int kStageBytes = (kCopyBytes + 127) / 128 * 128;
  // About 16 KB on their way per warp: with 12 warps on an SM the gather runs at the speed of the L2.
  static constexpr int kStages = kStageBytes > 6144 ? 2 : kStageBytes > 3072 ? 3 : 4;
  static constexpr int kWarpBytes = kStages * kStageBytes;
  static constexpr int kSharedBytes = kAttendWarps * kWarpBytes;
};

// Zeroes the value rows from `first` on. What lies past the query's diagonal block may hold anything, NaN included,
// and a weight of 0 does not silence a NaN.
template <int kValueDim>
__device__ __forceinline__ void clear_value_rows(uint32_t values, int first) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int at = lane * 16; at < kParentRows * kValueDim * 2; at += 512) {
    if (row_of_offset<kValueDim>(at) >= first) {
      asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(values + at), "r"(0) : "memory");
    }
  }
  __syncwarp();
}

// Grid: x = runs of kAttendWarps queries, the longest lists first, y = batch * kv head.
template <typename T, int kKeyDim, int kValueDim, int kTiles>
__global__ void __launch_bounds__(kAttendWarps * 32, kTiles == 1 ? 3 : 2)
    per_query_attend_kernel(AttendParams params) {
  using Block = PackedParent<kKeyDim, kValueDim>;
  using Ring = PerQueryRing<kKeyDim, kValueDim>;
  extern __shared__ __align__(128) char shared[];
  const GatherParams& p = params.gather;
  const int warp = threadIdx.x / 32;
  const int64_t query = int64_t{gridDim.x - 1 - blockIdx.x} * kAttendWarps + warp;
  if (query >= p.num_queries) {
    return;
  }
  const int64_t list_row = query / p.stride;
  GatherTask task = gather_task(p, blockIdx.y, query, list_row);
  RunningSoftmax<kValueDim, kTiles> state;
  const uint16_t* selected = nullptr;  // 16 bits per slot
  int last_candidate = task.num_candidates;
  if (params.selected) {
    selected =
        reinterpret_cast<const uint16_t*>(params.selected + task.batch * params.selected_batch +
                                          (list_row * p.num_kv_heads + task.kv_head) * params.mask_words);
    --last_candidate;  // the query's diagonal block is always selected
    if (task.num_candidates <= p.list_width) {
      task.num_slots = 0;  // everything is selected
    }
  }
  if (task.num_slots > 0) {
    ParentStream<Ring::kCopyBytes, Ring::kStageBytes, Ring::kStages> stream(
        p.packed + task.first_parent * Block::kBytes, Block::kBytes, p.num_parents, task.list, 0,
        task.num_slots, device::shared_address(shared) + warp * Ring::kWarpBytes);
    RotatedQuery<kKeyDim, kTiles> q;
    q.load(query_rows<T>(p, task, query), p.queries.head, p.group, p.score_scale, p.rope,
           task.num_candidates - 1);
    const TileAddress<kKeyDim> key_at;
    const TileAddress<kValueDim> value_at;
    unsigned next_selected = selected ? selected[0] : 0;
    for (int slot = 0; slot < task.num_slots; ++slot) {
      const int rows = last_candidate - slot * kParentRows;
      const unsigned present = ~next_selected & (rows >= kParentRows ? 0xffffu : (1u << max(rows, 0)) - 1u);
      next_selected = selected && slot + 1 < task.num_slots ? selected[slot + 1] : 0;
      const uint32_t block = stream.wait(slot);
      if (present) {
        if (rows < kParentRows) {
          clear_value_rows<kValueDim>(block + Block::kValueOffset, rows);
        }
        float s[kTiles][4];
        slot_scores(q, key_at, block, s);
        hide_rows(s, present);
        state.weigh(s);
        uint32_t weights[kTiles][2];
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          device::pack_transposed<T>(s[tile], weights[tile]);
        }
#pragma unroll
        for (int step = 0; step < kValueDim / 16; ++step) {
          uint32_t a[4];
          device::load_matrices_transposed(a, block + Block::kValueOffset + value_at.transposed(step));
#pragma unroll
          for (int tile = 0; tile < kTiles; ++tile) {
            device::mma_16x8x16<T>(state.out[tile][step], a, weights[tile][0], weights[tile][1]);
          }
        }
      }
      q.step_back();
      stream.release();
    }
    device::wait_copies<0>();
    state.finish();
  } else if (!params.first && !params.last) {
    return;  // nothing to add
  }
  write_state<T, kValueDim, kTiles>(params, task, query, state);
}

template <typename T, int kDim>
cudaError_t launch_per_query_attend(const AttendParams& params, cudaStream_t stream) {
  const GatherParams& p = params.gather;
  const LaunchShape shape{
      .grid = dim3(num_blocks(p.num_queries, kAttendWarps), p.num_batches * p.num_kv_heads),
      .threads = kAttendWarps * 32,
      .shared_bytes = PerQueryRing<kDim, kDim>::kSharedBytes};
  return dispatch_head_tiles(p.group, [&](auto tiles) {
    return launch_kernel(per_query_attend_kernel<T, kDim, kDim, tiles.value>, shape, stream, params);
  });
}

}  // namespace htree::tree_attention
