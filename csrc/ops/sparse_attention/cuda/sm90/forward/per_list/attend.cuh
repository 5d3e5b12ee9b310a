// One softmax step of tree attention for the selection_stride * G query rows that share a list, on Hopper:
// docs/semantics/tree_attention.md §1.5, §1.7, §1.12.
//
// A persistent block has four warpgroups. Eight producer warps gather the parents of a list into a ring of
// tiles and rotate their keys in place; two consumer warpgroups multiply. Asynchronous copies, warpgroup
// products and the order of both are those of FlashAttention-3.
#pragma once

#include <algorithm>

#include "device/sizes.h"
#include "device/sm90/pdl.cuh"
#include "host/cuda/kernel_launch.h"
#include "ops/sparse_attention/cuda/attend.h"
#include "ops/sparse_attention/cuda/rotations.h"
#include "ops/sparse_attention/cuda/sm90/forward/per_list/consumer.cuh"
#include "ops/sparse_attention/cuda/sm90/forward/per_list/producer.cuh"

namespace htree::tree_attention {

template <typename Tile>
__device__ __forceinline__ void init_barriers(PerListShared<Tile>& shared) {
  constexpr int kReaders = Tile::kSplitKeys ? 1 : 2;  // consumer warpgroups that read a tile
  for (int stage = 0; stage < Tile::kStages; ++stage) {
    for (int slot = 0; slot < kTileSlots; ++slot) {
      device::barrier_init(&shared.keys_landed[stage][slot], 1);
    }
    device::barrier_init(&shared.keys_full[stage], kTileSlots);
    device::barrier_init(&shared.values_full[stage], kTileSlots);
    device::barrier_init(&shared.keys_empty[stage], kReaders);
    device::barrier_init(&shared.values_empty[stage], kReaders);
  }
  device::fence_barrier_init();
}

// Grid: at most one block per SM; a block takes every gridDim.x-th task.
template <typename T, typename Tile, bool kRotates>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    per_list_attend_kernel(const __grid_constant__ AttendParams params) {
#if HTREE_SM90A
  static_assert(sizeof(PerListShared<Tile>) <= device::kHopperSharedBytes);
  extern __shared__ __align__(1024) char block_shared[];
  PerListShared<Tile>& shared = *reinterpret_cast<PerListShared<Tile>*>(block_shared);
  if (threadIdx.x == 0) {
    init_barriers(shared);
  }
  __syncthreads();
  device::pdl_wait();
  if (threadIdx.x == 0) {
    device::pdl_launch_dependents();
  }
  if (threadIdx.x < 128 * Tile::kProducerGroups) {
    device::lower_registers<Tile::kProducerRegisters>();
    PerListProducer<Tile, kRotates>(params, shared).template run<T>();
  } else {
    device::raise_registers<Tile::kConsumerRegisters>();
    PerListConsumer<T, Tile>(params, shared).run();
  }
#else
  __trap();  // chosen for sm_90a alone, see plan/
#endif
}

template <typename T, int kDim, int kRows>
cudaError_t launch_per_list_rows(const AttendParams& params, cudaStream_t stream) {
  using Tile = PerListTile<kDim, kDim, kRows>;
  int num_sms = 0;
  const cudaError_t error = device_attribute(cudaDevAttrMultiProcessorCount, num_sms);
  if (error != cudaSuccess) {
    return error;
  }
  const LaunchShape shape{.grid = static_cast<unsigned>(std::min(num_list_tasks<Tile>(params), num_sms)),
                          .threads = Tile::kThreads,
                          .shared_bytes = sizeof(PerListShared<Tile>),
                          .pdl = true};
  return dispatch_rotations(params.rotations, [&](auto rotates) {
    return launch_kernel(per_list_attend_kernel<T, Tile, rotates.value>, shape, stream, params);
  });
}

template <typename T, int kDim>
cudaError_t launch_per_list_attend(const AttendParams& params, cudaStream_t stream) {
  return params.gather.stride * params.gather.group <= 64
             ? launch_per_list_rows<T, kDim, 64>(params, stream)
             : launch_per_list_rows<T, kDim, 128>(params, stream);
}

}  // namespace htree::tree_attention
