// Where a parent's users of some lists begin among its entries, see InverseParams.
#pragma once

#include <cstdint>

#include "device/reduce.cuh"

namespace htree::tree_attention {

// First entry of [begin, end) whose list is not before `list`. A whole warp; every round leaves a 32nd.
__device__ __forceinline__ uint32_t first_entry(const uint32_t* entries, uint32_t begin, uint32_t end,
                                                uint32_t list, uint32_t width) {
  const uint32_t lane = threadIdx.x % 32;
  while (begin < end) {
    const uint32_t step = (end - begin + 31) / 32;
    const uint32_t at = begin + lane * step;
    const unsigned reached = __ballot_sync(device::kFullMask, at >= end || entries[at] / width >= list);
    const uint32_t first = reached ? __ffs(reached) - 1 : 32;
    end = min(end, begin + first * step);
    begin = first == 0 ? end : begin + (first - 1) * step + 1;
  }
  return begin;
}

}  // namespace htree::tree_attention
