// Addresses in the shared window, as the instructions that name shared memory take them.
#pragma once

#include <cstdint>

namespace htree::device {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// The 128-byte swizzle wants its tiles aligned to 1024 bytes; dynamic shared memory is not. A launch asks for
// kSharedAlignment bytes more than its Shared.
constexpr int kSharedAlignment = 1024;

template <class Shared>
__device__ __forceinline__ Shared& align_shared(uint8_t* raw) {
  constexpr uintptr_t kMask = kSharedAlignment - 1;
  return *reinterpret_cast<Shared*>((reinterpret_cast<uintptr_t>(raw) + kMask) & ~kMask);
}

}  // namespace htree::device
