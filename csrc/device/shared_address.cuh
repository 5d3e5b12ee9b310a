// Addresses in the shared window, as the instructions that name shared memory take them.
#pragma once

#include <cstdint>

namespace htree::device {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

}  // namespace htree::device
