// One softmax step of tree attention on Hopper (sm_90a), docs/semantics/tree_attention.md §1.5, §1.7: as
// forward/per_query/attend.cuh, but 16 neighbouring queries of a kv head share one gather.
//
// A block walks the union of its queries' lists in the order of position. A producer warp copies each parent
// of the union once into a ring. A warp per query takes the parents that its own list holds and passes over
// the others. What a query computes depends on its own list alone: neither its neighbours nor the windows
// change a bit.
#pragma once

#include "device/sizes.h"
#include "device/sm90/wgmma.cuh"
#include "host/cuda/kernel_launch.h"
#include "ops/sparse_attention/cuda/attend.h"
#include "ops/sparse_attention/cuda/rotations.h"
#include "ops/sparse_attention/cuda/sm80/forward/running_softmax.cuh"
#include "ops/sparse_attention/cuda/sm80/masked_lists.cuh"
#include "ops/sparse_attention/cuda/sm90/forward/shared_gather/parent_union.cuh"
#include "ops/sparse_attention/cuda/sm90/forward/shared_gather/rotated_half_query.cuh"
#include "ops/tree/cuda/launch_params.h"

namespace htree::tree_attention {

template <int kKeyDim, int kValueDim, int kTiles>
struct SharedGatherShape {
  using Block = PackedParent<kKeyDim, kValueDim>;
  static constexpr int kWarps = kTiles == 1 ? 16 : 8;  // queries of a block
  static constexpr int kThreads = (kWarps + 4) * 32;   // and a warpgroup, one warp of which copies
  // Of the 65536 registers the launch gives out 96 x 640 or 168 x 384.
  static constexpr int kRegisters = kTiles == 1 ? 112 : 232;
  static constexpr int kProducerRegisters = kTiles == 1 ? 24 : 40;
  static constexpr int kLaunchRegisters = 65536 / (kThreads / 128 * 128) / 8 * 8;
  static_assert(kWarps * 32 * kRegisters + 128 * kProducerRegisters <= kThreads * kLaunchRegisters);
  using Shared = UnionShared<Block, kWarps>;
  static_assert(sizeof(Shared) <= device::kHopperSharedBytes);
};

// Adds P V for the children of a packed parent. `keep` marks the rows whose values exist for this query.
template <typename T, int kValueDim, int kTiles, bool kPartial>
__device__ __forceinline__ void add_values(RunningSoftmax<kValueDim, kTiles>& state,
                                           const StepOffsets<kValueDim>& at, uint32_t values,
                                           const uint32_t (&weights)[kTiles][2], unsigned keep) {
  const RowMask<kPartial> kept(keep);
#pragma unroll
  for (int step = 0; step < kValueDim / 16; ++step) {
    uint32_t a[4];
    device::load_matrices_transposed(a, values + at.transposed[step % at.kSteps] + at.further(step));
    kept.apply(a);
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      device::mma_16x8x16<T>(state.out[tile][step], a, weights[tile][0], weights[tile][1]);
    }
  }
}

// The query of one warp, on its way along its list.
template <typename T, int kKeyDim, int kValueDim, int kTiles, bool kSelected, bool kRotates>
class SharedGatherQuery {
 public:
  RunningSoftmax<kValueDim, kTiles> state;

  // `selected`: 16 bits per slot of the list.
  __device__ __forceinline__ SharedGatherQuery(const AttendParams& params, const GatherTask& task,
                                               int64_t query, const uint16_t* selected)
      : rotations_(kRotates ? params.rotations + RotationFactors<kKeyDim>::lane_offset() : nullptr),
        selected_(selected),
        rows_left_(task.num_candidates - (kSelected ? 1 : 0)) {  // its diagonal block is always selected
    if (task.num_slots == 0) {
      return;
    }
    q_.load(query_rows<T>(params.gather, task, query), params.gather.queries.head, params.gather.group,
            params.gather.score_scale, params.gather.rope, task.num_candidates - 1);
    if constexpr (kRotates) {
      factors_.load(rotations_);
    }
    if constexpr (kSelected) {
      next_selected_ = selected_[0];
    }
  }

  // Works on the next slot of the list, whose packed parent lies in shared memory at `block`.
  __device__ __forceinline__ void take(uint32_t block) {
    using Block = PackedParent<kKeyDim, kValueDim>;
    const unsigned exist = rows_left_ >= kParentRows ? 0xffffu : (1u << max(rows_left_, 0)) - 1u;
    unsigned present = exist;
    if constexpr (kSelected) {
      present &= ~next_selected_;
    }
    float s[kTiles][4];
    q_.template scores<kRotates>(factors_, key_at_, block, s);
    rows_left_ -= kParentRows;
    if constexpr (kRotates) {  // factors for the next slot; the table has one slot more than the longest list
      rotations_ += RotationSlots<kKeyDim>::kSlotPairs;
      factors_.load(rotations_);
    }
    if constexpr (kSelected) {
      ++selected_;
      next_selected_ = rows_left_ > 0 ? *selected_ : 0;
      if (present == 0) {
        return;
      }
    }
    if (present != 0xffffu) {
      hide_rows(s, present);
    }
    state.weigh(s);
    uint32_t weights[kTiles][2];
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      device::pack_transposed<T>(s[tile], weights[tile]);
    }
    if (exist == 0xffffu) {
      add_values<T, kValueDim, kTiles, false>(state, value_at_, block + Block::kValueOffset, weights, exist);
    } else {
      add_values<T, kValueDim, kTiles, true>(state, value_at_, block + Block::kValueOffset, weights, exist);
    }
  }

 private:
  RotatedHalfQuery<kKeyDim, kTiles> q_;
  RotationFactors<kKeyDim> factors_;
  StepOffsets<kKeyDim> key_at_;
  StepOffsets<kValueDim> value_at_;
  const __half2* rotations_;
  const uint16_t* selected_;
  unsigned next_selected_ = 0;
  int rows_left_;  // candidates from the next slot on
};

// Grid: x = runs of kWarps queries, the longest lists first, y = batch * kv head.
template <typename T, int kKeyDim, int kValueDim, int kTiles, bool kSelected, bool kRotates>
__global__ void __launch_bounds__(SharedGatherShape<kKeyDim, kValueDim, kTiles>::kThreads, 1)
    shared_gather_attend_kernel(AttendParams params) {
#if HTREE_SM90A
  using Shape = SharedGatherShape<kKeyDim, kValueDim, kTiles>;
  using Block = typename Shape::Block;
  extern __shared__ __align__(128) char shared_bytes[];
  auto& shared = *reinterpret_cast<typename Shape::Shared*>(shared_bytes);
  const GatherParams& p = params.gather;
  const int warp = threadIdx.x / 32;
  const int64_t first_query = int64_t{gridDim.x - 1 - blockIdx.x} * Shape::kWarps;
  const int64_t last_query = min(first_query + Shape::kWarps, int64_t{p.num_queries}) - 1;
  if (p.t0 + first_query < params.masked_end &&
      all_masked_rows(p, blockIdx.y, min(first_query + warp, last_query), Shape::kWarps)) {
    return;  // another kernel writes them
  }
  const int num_parents = static_cast<int>((p.t0 + last_query) / p.node_span / kParentRows) + 1;
  const char* packed = p.packed + int64_t{blockIdx.y} * p.num_parents * Block::kBytes;
  if (threadIdx.x == 0) {
    shared.ring.init(Shape::kWarps);
  }

  if (warp >= Shape::kWarps) {
    device::lower_registers<Shape::kProducerRegisters>();
    load_unions(shared, num_parents, packed, warp);
    return;
  }
  device::raise_registers<Shape::kRegisters>();

  const int64_t query = first_query + warp;
  const bool exists = query <= last_query;
  GatherTask task =
      gather_task(p, blockIdx.y, exists ? query : last_query, (exists ? query : last_query) / p.stride);
  const uint16_t* selected = nullptr;
  if constexpr (kSelected) {
    selected = reinterpret_cast<const uint16_t*>(
        params.selected + task.batch * params.selected_batch +
        ((exists ? query : last_query) / p.stride * p.num_kv_heads + task.kv_head) * params.mask_words);
    if (task.num_candidates <= p.list_width) {
      task.num_slots = 0;  // everything is selected
    }
  }
  if (!exists) {
    task.num_slots = 0;
  }
  SharedGatherQuery<T, kKeyDim, kValueDim, kTiles, kSelected, kRotates> own(params, task, query, selected);
  walk_unions(shared, ListCursor(task.list, task.num_slots, p.num_parents), num_parents, warp,
              [&](uint32_t block, int) { own.take(block); });
  if (!exists || (task.num_slots == 0 && !params.first && !params.last)) {
    return;  // nothing to add
  }
  own.state.finish();
  write_state<T, kValueDim, kTiles>(params, task, query, own.state);
#else
  __trap();  // chosen for sm_90a alone, see plan/
#endif
}

template <typename T, int kDim, int kTiles, bool kSelected>
cudaError_t launch_shared_gather_tiles(const AttendParams& params, cudaStream_t stream) {
  using Shape = SharedGatherShape<kDim, kDim, kTiles>;
  const GatherParams& p = params.gather;
  const LaunchShape shape{
      .grid = dim3(num_blocks(p.num_queries, Shape::kWarps), p.num_batches * p.num_kv_heads),
      .threads = Shape::kThreads,
      .shared_bytes = sizeof(typename Shape::Shared)};
  return dispatch_rotations(params.rotations, [&](auto rotates) {
    return launch_kernel(shared_gather_attend_kernel<T, kDim, kDim, kTiles, kSelected, rotates.value>, shape,
                         stream, params);
  });
}

template <typename T, int kDim>
cudaError_t launch_shared_gather_attend(const AttendParams& params, cudaStream_t stream) {
  return dispatch_head_tiles(params.gather.group, [&](auto tiles) {
    return params.selected ? launch_shared_gather_tiles<T, kDim, tiles.value, true>(params, stream)
                           : launch_shared_gather_tiles<T, kDim, tiles.value, false>(params, stream);
  });
}

}  // namespace htree::tree_attention
