// Where the selection kernels keep a row: pure functions of the problem and of the device's shared memory.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

namespace htree::tree_attention {

// Blocks that share device scratch: enough to fill a GPU, few enough to bound the memory.
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

// Dynamic shared memory one block may ask for on the current device.
inline int64_t shared_limit() {
  int device = 0;
  int bytes = 48 * 1024;
  if (cudaGetDevice(&device) == cudaSuccess) {
    cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  }
  return bytes - kReservedShared;
}

// More than 48 KB must be asked for per kernel and per device; asking again costs little beside a launch. A
// refusal stays the last error, and the check after the launch reports it.
template <typename Kernel>
void allow_shared(Kernel kernel, int64_t bytes) {
  if (bytes > 40 * 1024) {
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
  }
}

inline int64_t round_up_16(int64_t bytes) {
  return (bytes + 15) / 16 * 16;
}

}  // namespace htree::tree_attention
