// Turns the positions of a selection into the parents of the next layer.
#pragma once

#include <cstdint>

#include "device/numeric.cuh"
#include "device/select.cuh"
#include "device/work.cuh"
#include "host/cuda/kernel_launch.h"
#include "ops/selection/cuda/any/select_plan.h"
#include "ops/selection/cuda/any/select_topk.h"
#include "ops/tree/cuda/any/lists.cuh"

namespace htree::tree_attention {

constexpr int kNextParentsThreads = 128;

// A block has one row: it maps positions to nodes, sorts them where they do not ascend yet, and stores them.
// The IO-only variant copies positions.
template <typename Work>
__global__ void __launch_bounds__(kNextParentsThreads)
    compute_next_parents_kernel(const NextParentsParams params, const NextParentsPlan plan) {
  constexpr int32_t kMissing = INT32_MAX;  // sorts after every node
  extern __shared__ int32_t shared_nodes[];
  __shared__ int first_missing[kNextParentsThreads / device::kWarpSize];
  int32_t* nodes = plan.in_shared ? shared_nodes
                                  : reinterpret_cast<int32_t*>(static_cast<unsigned char*>(params.scratch) +
                                                               blockIdx.x * plan.scratch_bytes);
  for (int64_t row_idx = blockIdx.x; row_idx < params.num_rows(); row_idx += gridDim.x) {
    const RowIndex row = row_index(row_idx, params.num_queries, params.num_lists);
    const int32_t* positions = at_row(params.positions, row.batch, row.query, row.list);
    int32_t* out = at_row(params.next_parents, row.batch, row.query, row.list);
    if constexpr (Work::kIoOnly) {
      for (int64_t i = threadIdx.x; i < params.top_k; i += kNextParentsThreads) {
        out[i] = positions[i];
      }
      continue;
    }
    const int32_t* parents = nullptr;
    int64_t num_parents = 0;
    if (params.parents.data != nullptr) {
      parents = at_row(params.parents, row.batch, row.query, row.list);
      num_parents = count_parents<kNextParentsThreads>(parents, params.list_width, first_missing);
    }
    for (int64_t i = threadIdx.x; i < plan.sort_size; i += kNextParentsThreads) {
      int32_t node = kMissing;
      if (i < params.top_k) {
        const int64_t p = positions[i];
        if (parents == nullptr) {
          node = p == -1 ? kMissing : static_cast<int32_t>(p);
        } else if (p >= 0 && p / params.rate < num_parents) {
          node = static_cast<int32_t>(parents[p / params.rate] * params.rate + p % params.rate);
        }
      }
      nodes[i] = node;
    }
    __syncthreads();
    bool descends = false;
    for (int64_t i = threadIdx.x + 1; i < plan.sort_size; i += kNextParentsThreads) {
      descends |= nodes[i - 1] > nodes[i];
    }
    if (__syncthreads_or(descends)) {
      device::block_sort(nodes, plan.sort_size);
    }
    for (int64_t i = threadIdx.x; i < params.top_k; i += kNextParentsThreads) {
      out[i] = nodes[i] == kMissing ? -1 : nodes[i];
    }
    __syncthreads();
  }
}

template <typename Work>
cudaError_t launch_compute_next_parents(const NextParentsParams& params, cudaStream_t stream) {
  if (params.num_rows() == 0 || params.top_k == 0) {
    return cudaSuccess;
  }
  const NextParentsPlan plan = next_parents_plan(params);
  const LaunchShape shape{.grid = static_cast<unsigned>(plan.num_blocks),
                          .threads = kNextParentsThreads,
                          .shared_bytes = plan.shared_bytes};
  return launch_kernel(compute_next_parents_kernel<Work>, shape, stream, params, plan);
}

}  // namespace htree::tree_attention
