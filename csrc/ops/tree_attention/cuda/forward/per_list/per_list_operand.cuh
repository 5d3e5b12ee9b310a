// A tile of packed parents in shared memory as an operand of wgmma.
#pragma once

#include "device/hopper/wgmma.cuh"

namespace htree::tree_attention {

// Descriptors; groups of 8 rows lie 8 rows apart whatever the head dim.
template <int kDim>
struct TileOperand {
  static constexpr device::Swizzle kSwizzle = kDim == 32 ? device::Swizzle::k64 : device::Swizzle::k128;
  static constexpr uint32_t kGroupBytes = 8 * kDim * 2;

  // Rows are m or n and dims are k.
  __device__ __forceinline__ static uint64_t rows(const void* tile) {
    return device::wgmma_descriptor<kSwizzle>(device::shared_address(tile), 16, kGroupBytes);
  }
  // 16 dims from 16 * step on.
  __device__ __forceinline__ static uint64_t dims(uint64_t rows, int step) {
    return device::advance(rows, dims_offset(step));
  }
  __device__ __forceinline__ static constexpr uint32_t dims_offset(int step) {
    return step / 4 * 1024 + step % 4 * 32;
  }
  // `bytes` further, a multiple of 16, as device::advance(). Only the lower half changes: the upper one stays
  // a constant, which spares half of the instructions that bring descriptors into uniform registers.
  __device__ __forceinline__ static uint64_t further(uint64_t descriptor, uint32_t bytes) {
    return (descriptor & 0xffffffff00000000ull) | (static_cast<uint32_t>(descriptor) + (bytes >> 4));
  }
  // Rows are k and dims are n; with head dim 128 the upper 64 dims stand 1024 bytes further.
  __device__ __forceinline__ static uint64_t transposed(const void* tile) {
    return device::wgmma_descriptor<kSwizzle>(device::shared_address(tile), 1024, kGroupBytes);
  }
};

}  // namespace htree::tree_attention
