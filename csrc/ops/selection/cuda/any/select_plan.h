// Where the selection kernels keep a row: functions of the problem and of the device's shared memory. No torch.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "ops/selection/cuda/any/select_topk.h"

namespace htree::tree_attention {

// Thread blocks that share device scratch: enough to fill a GPU, few enough to bound the memory.
constexpr int64_t kScratchBlocks = 512;
// Shared memory that the kernels' fixed parts and the system need.
constexpr int64_t kReservedShared = 8 * 1024;

inline int64_t power_of_two_above(int64_t value) {
  int64_t power = 1;
  while (power < value) {
    power *= 2;
  }
  return power;
}

// The dynamic shared memory that one thread block may ask for on the current device.
inline int64_t shared_limit() {
  int device = 0;
  int bytes = 48 * 1024;
  if (cudaGetDevice(&device) == cudaSuccess) {
    cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  }
  return bytes - kReservedShared;
}

inline int64_t round_up_16(int64_t bytes) {
  return (bytes + 15) / 16 * 16;
}

// Where the launcher puts each buffer: in shared memory if it fits, else in device memory, one
// for each thread block.
struct SelectPlan {
  int64_t sort_size;  // power of two >= top_k, 0 when the order is ascending
  bool keys_shared;
  bool sorting_shared;
  bool normalizer_shared;
  int64_t shared_bytes;
  int64_t scratch_bytes;  // of one thread block
  int64_t num_blocks;
};

// Shared memory goes first to the sort buffer and the normalisers, which are small and used most.
inline SelectPlan select_plan(const SelectParams& params) {
  SelectPlan plan{};
  int64_t left = shared_limit();
  const auto place = [&](int64_t bytes) {
    const bool fits = round_up_16(bytes) <= left;
    left -= fits ? round_up_16(bytes) : 0;
    (fits ? plan.shared_bytes : plan.scratch_bytes) += round_up_16(bytes);
    return fits;
  };
  const int64_t most = std::min(params.top_k, params.capacity);
  plan.sort_size =
      params.order == SelectionOrder::kByKey ? power_of_two_above(std::max<int64_t>(most, 1)) : 0;
  plan.sorting_shared = place(plan.sort_size * 8);
  plan.normalizer_shared = place(params.group * 4);
  plan.keys_shared = place(params.capacity * 4);
  const int64_t rows = std::min<int64_t>(params.num_rows(), INT32_MAX);
  plan.num_blocks = plan.scratch_bytes == 0 ? rows : std::min(rows, kScratchBlocks);
  return plan;
}

struct NextParentsPlan {
  int64_t sort_size;  // power of two >= top_k
  bool in_shared;
  int64_t shared_bytes;
  int64_t scratch_bytes;  // of one thread block
  int64_t num_blocks;
};

inline NextParentsPlan next_parents_plan(const NextParentsParams& params) {
  NextParentsPlan plan{};
  plan.sort_size = power_of_two_above(params.top_k);
  plan.in_shared = plan.sort_size * 4 <= shared_limit();
  (plan.in_shared ? plan.shared_bytes : plan.scratch_bytes) = plan.sort_size * 4;
  const int64_t rows = std::min<int64_t>(params.num_rows(), INT32_MAX);
  plan.num_blocks = plan.in_shared ? rows : std::min(rows, kScratchBlocks);
  return plan;
}

}  // namespace htree::tree_attention
