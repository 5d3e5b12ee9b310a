// Dynamic shared memory above 48 KB has to be asked for.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace htree::tree_attention {

// Before every launch: the maximum belongs to the current device. A failure shows as the launch's error.
template <typename Kernel>
void allow_shared_bytes(Kernel kernel, int64_t bytes) {
  if (bytes > 48 * 1024) {
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  }
}

}  // namespace htree::tree_attention
