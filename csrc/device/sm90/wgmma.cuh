// Matrix products of a warpgroup (sm_90a): four warps, the first with a number that is a multiple of four,
// multiply 64 x k by k x N from shared memory, with fp32 accumulators in registers. Also the registers and
// barriers of warpgroups with different roles. All 128 threads must call each function together with the same
// arguments, except where a function says "a warp". Code that calls them is compiled for sm_90a alone: a
// kernel guards its body with `#if HTREE_SM90A`.
//
// Order of use: wgmma_fence(), products, wgmma_commit(), wgmma_wait<n>(). Accumulators may be touched only
// after a wait that covers their products.
#pragma once

#include <cstdint>

#include "device/shared_memory.cuh"
#include "device/sm90/wgmma_instructions.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HTREE_SM90A 1
#else
#define HTREE_SM90A 0
#endif

namespace htree::device {

// Orders what was written to registers and shared memory before the products that follow.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Returns when at most kPending committed groups are unfinished.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving uses of the accumulators across this line. It is no instruction.
template <int kCount>
__device__ __forceinline__ void pin_registers(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    asm volatile("" : "+f"(d[i])::"memory");
  }
}

// ---- matrix descriptors
//
// Both operands are stored in rows as wide as the swizzle, as tensor copies lay them down: the 16-byte chunk
// c of row r stands at chunk c ^ (r % 8) for 128 bytes, c ^ (r / 2 % 4) for 64 and c ^ (r / 4 % 2) for 32
// (address bits 4-6 are XORed with bits 7-9). The base is aligned to 8 rows.
//
// K-major (k is contiguous): a row is one m or n. A product of k16 (k32 for 1-byte types) reads 32 bytes of
// each row, and within the width the next one starts 32 bytes further on (advance()). MN-major (m or n is
// contiguous, 2-byte types only): a row is one k and holds `width` bytes of consecutive m or n; the next
// `width` bytes of m or n are `block_stride` bytes further on. The next k16 starts 16 rows further on.

enum class Swizzle : int { k32 = 32, k64 = 64, k128 = 128 };  // bytes

// `leading` and `stride` are in bytes.
template <Swizzle kSwizzle>
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t shared, uint32_t leading, uint32_t stride) {
  constexpr uint64_t kMode = kSwizzle == Swizzle::k128 ? 1 : kSwizzle == Swizzle::k64 ? 2 : 3;
  return (uint64_t{(shared & 0x3ffff) >> 4}) | (uint64_t{leading >> 4} << 16) |
         (uint64_t{stride >> 4} << 32) | (kMode << 62);
}

template <Swizzle kSwizzle>
__device__ __forceinline__ uint64_t k_major_descriptor(const void* tile) {
  return wgmma_descriptor<kSwizzle>(shared_address(tile), 16, 8 * static_cast<uint32_t>(kSwizzle));
}

template <Swizzle kSwizzle>
__device__ __forceinline__ uint64_t mn_major_descriptor(const void* tile, uint32_t block_stride) {
  return wgmma_descriptor<kSwizzle>(shared_address(tile), block_stride, 8 * static_cast<uint32_t>(kSwizzle));
}

// The descriptor `bytes` further on, a multiple of 16.
__device__ __forceinline__ uint64_t advance(uint64_t descriptor, uint32_t bytes) {
  return descriptor + (bytes >> 4);
}

// ---- products: d[64 x N] = a[64 x k] * b[k x N] + (accumulate ? d : 0)
//
// Thread t of the warpgroup is lane i = t % 32 of warp w = t / 32. It holds d of rows 16 w + i / 4 and 8
// further down: element d[4 j + 2 h + c] is row 16 w + i / 4 + 8 h, column 8 j + 2 (i % 4) + c.

enum class Major : int { kK = 0, kMN = 1 };

// T is __nv_bfloat16 or __half (k = 16), or __nv_fp8_e4m3 (k = 32, K-major only).
// For N see wgmma_instructions.cuh.
template <typename T, int N, Major kMajorA = Major::kK, Major kMajorB = Major::kK>
__device__ __forceinline__ void wgmma(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate) {
  static_assert(sizeof(T) == 2 || (kMajorA == Major::kK && kMajorB == Major::kK));
  WgmmaInstruction<T, N>::template shared<static_cast<int>(kMajorA), static_cast<int>(kMajorB)>(d, a, b,
                                                                                                accumulate);
}

// A in registers, laid out as d is. For 2-byte types a[0] and a[1] are rows i / 4 and i / 4 + 8 of columns 2
// (i % 4) and the next, a[2] and a[3] the same rows 8 columns further on. For 1-byte types the columns are 4
// (i % 4) ... + 3, and 16 further on.
template <typename T, int N, Major kMajorB = Major::kK>
__device__ __forceinline__ void wgmma(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b,
                                      bool accumulate) {
  static_assert(sizeof(T) == 2 || kMajorB == Major::kK);
  WgmmaInstruction<T, N>::template registers<static_cast<int>(kMajorB)>(d, a, b, accumulate);
}

// ---- roles

// The value of lane 0, of which the compiler then knows that it is the same in all lanes of the warp. What
// depends on it does not diverge. After a divergence the compiler would keep descriptors in registers of the
// lanes and move them for every product.
__device__ __forceinline__ int uniform(int value) {
  return __shfl_sync(0xffffffff, value, 0);
}

// Sets the registers per thread of this warpgroup from here on: a multiple of 8 in 24 ... 256. All
// warpgroups of the block together must fit into what the launch gave, or raise_registers waits for
// ever: assert the sum.
template <int kRegisters>
__device__ __forceinline__ void raise_registers() {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256);
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void lower_registers() {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256);
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Barrier `index` (1 ... 15; 0 is __syncthreads) of `num_threads` threads, a multiple of 32. A warp may call
// it alone. sync waits for all threads, arrive does not wait.
__device__ __forceinline__ void named_barrier_sync(int index, int num_threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(index), "r"(num_threads) : "memory");
}
// As named_barrier_sync; tells every thread whether `predicate` holds in any of them.
__device__ __forceinline__ bool named_barrier_any(int index, int num_threads, bool predicate) {
  int any;
  asm volatile(
      "{\n"
      ".reg .pred p, q;\n"
      "setp.ne.b32 p, %3, 0;\n"
      "barrier.red.or.pred q, %1, %2, p;\n"
      "selp.b32 %0, 1, 0, q;\n"
      "}"
      : "=r"(any)
      : "r"(index), "r"(num_threads), "r"(static_cast<int>(predicate))
      : "memory");
  return any != 0;
}
__device__ __forceinline__ void named_barrier_arrive(int index, int num_threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(index), "r"(num_threads) : "memory");
}

}  // namespace htree::device
