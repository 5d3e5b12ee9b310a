// Shared memory by its address in the shared window, which is what PTX instructions take.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace htree::device {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// The 128-byte swizzle needs tiles aligned to 1024 bytes, and dynamic shared memory is not. So a launch asks
// for kSharedAlignment bytes more than its Shared has.
constexpr int kSharedAlignment = 1024;

template <class Shared>
__device__ __forceinline__ Shared& align_shared(uint8_t* raw) {
  constexpr uintptr_t kMask = kSharedAlignment - 1;
  return *reinterpret_cast<Shared*>((reinterpret_cast<uintptr_t>(raw) + kMask) & ~kMask);
}

// `address` is a multiple of 16.
__device__ __forceinline__ uint4 load_shared_16(uint32_t address) {
  uint4 x;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(address)
               : "memory");
  return x;
}
__device__ __forceinline__ void store_shared_16(uint32_t address, const uint4& x) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x.x), "r"(x.y), "r"(x.z),
               "r"(x.w)
               : "memory");
}
// `address` is a multiple of 8.
__device__ __forceinline__ uint2 load_shared_8(uint32_t address) {
  uint2 x;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(address) : "memory");
  return x;
}
__device__ __forceinline__ void store_shared_8(uint32_t address, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x), "f"(y) : "memory");
}
// `address` is a multiple of 4.
__device__ __forceinline__ uint32_t load_shared_4(uint32_t address) {
  uint32_t x;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return x;
}
__device__ __forceinline__ void store_shared_4(uint32_t address, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
}

}  // namespace htree::device
