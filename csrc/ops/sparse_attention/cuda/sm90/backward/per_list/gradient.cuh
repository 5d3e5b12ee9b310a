// Gradients of one layer of tree attention for the selection_stride * G query rows that share a list, on
// Hopper: docs/semantics/tree_attention.md §1.10, §1.12.
//
// A persistent block has three warpgroups. The four warps of the first, the producers, gather the parents of
// a list and rotate their keys. The other two, the consumers, compute S^T, dP^T, dV, dK' and dQ of a tile.
// Five products in one pass move fewer bytes than a second pass over the inverted lists would: that reads
// q and dO once per use.
#pragma once

#include <algorithm>

#include "device/sizes.h"
#include "host/cuda/kernel_launch.h"
#include "ops/sparse_attention/cuda/gradients.h"
#include "ops/sparse_attention/cuda/rotations.h"
#include "ops/sparse_attention/cuda/sm90/backward/per_list/consumer.cuh"
#include "ops/sparse_attention/cuda/sm90/backward/per_list/producer.cuh"

namespace htree::tree_attention {

template <typename Tile>
__device__ __forceinline__ void init_gradient_barriers(GradientShared<Tile>& shared) {
  for (int stage = 0; stage < Tile::kStages; ++stage) {
    for (int warp = 0; warp < Tile::kProducerWarps; ++warp) {
      device::barrier_init(&shared.keys_landed[stage][warp], 1);
    }
    device::barrier_init(&shared.keys_full[stage], 32 * Tile::kProducerWarps);
    device::barrier_init(&shared.values_full[stage], Tile::kProducerWarps);
    device::barrier_init(&shared.keys_empty[stage], 2);
    device::barrier_init(&shared.values_empty[stage], 2);
  }
  device::fence_barrier_init();
}

// Grid: at most one block per SM; a block takes every gridDim.x-th task.
template <typename T, typename Tile, bool kRotates>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    per_list_gradient_kernel(const __grid_constant__ PerListGradientParams params) {
#if HTREE_SM90A
  static_assert(sizeof(GradientShared<Tile>) <= device::kHopperSharedBytes);
  extern __shared__ __align__(1024) char gradient_shared[];
  GradientShared<Tile>& shared = *reinterpret_cast<GradientShared<Tile>*>(gradient_shared);
  if (threadIdx.x == 0) {
    init_gradient_barriers(shared);
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    device::lower_registers<Tile::kProducerRegisters>();
    GradientProducer<T, Tile, kRotates>(params, shared).run();
  } else {
    device::raise_registers<Tile::kConsumerRegisters>();
    GradientConsumer<T, Tile>(params, shared).run();
  }
#else
  __trap();  // chosen for sm_90a alone, see plan/
#endif
}

template <typename T, int kDim>
cudaError_t launch_per_list_gradient(const PerListGradientParams& params, cudaStream_t stream) {
  using Tile = GradientTile<kDim>;
  int num_sms = 0;
  const cudaError_t error = device_attribute(cudaDevAttrMultiProcessorCount, num_sms);
  if (error != cudaSuccess) {
    return error;
  }
  const LaunchShape shape{.grid = static_cast<unsigned>(std::min<int64_t>(params.run.num_tasks, num_sms)),
                          .threads = Tile::kThreads,
                          .shared_bytes = sizeof(GradientShared<Tile>)};
  return dispatch_rotations(params.rotations, [&](auto rotates) {
    return launch_kernel(per_list_gradient_kernel<T, Tile, rotates.value>, shape, stream, params);
  });
}

}  // namespace htree::tree_attention
