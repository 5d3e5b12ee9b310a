// Matrix products of a warp, from sm_80 on: fragments from shared memory, 16 x 8 x 16 products with fp32
// accumulators, and the copies that feed them. All 32 lanes must call every function, with the same shapes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "device/numeric.cuh"
#include "device/shared_memory.cuh"

namespace htree::device {

// Copies 16 bytes from global to shared memory past the L1; complete after commit_copies() and wait_copies().
__device__ __forceinline__ void copy_async_16(uint32_t shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}
// Copies four bytes.
__device__ __forceinline__ void copy_async_4(uint32_t shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared), "l"(global) : "memory");
}
// Copies the first `bytes` (0 to 16) of 16 bytes; the others are not read and become zeros.
__device__ __forceinline__ void copy_async_16_prefix(uint32_t shared, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Returns when at most kPending of this thread's committed groups are unfinished.
template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Loads four 8 x 8 matrices of 2-byte elements. Lane i gives the address of row i % 8 of matrix i / 8,
// aligned to 16 bytes. Of each matrix it receives row i / 4, columns 2 * (i % 4) and the next.
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// Transposes the 8 x 8 matrix of 2-byte elements that the warp holds, two elements to a lane.
__device__ __forceinline__ uint32_t transpose_matrix(uint32_t x) {
  uint32_t y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

// c[16 x 8] += a[16 x 16] * b[16 x 8]. Lane i holds c of rows i / 4 (c0, c1) and i / 4 + 8 (c2, c3), columns
// 2 * (i % 4) and the next. Of column i / 4 of b it holds rows 2 * (i % 4) and the next in b0, and the rows 8
// further down in b1.
template <typename T>
__device__ __forceinline__ void mma_16x8x16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (__is_same(T, __half)) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    static_assert(__is_same(T, __nv_bfloat16));
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// Two floats, rounded to T; `low` goes into the lower half.
template <typename T>
__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
  uint32_t r;
  if constexpr (__is_same(T, __half)) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  } else {
    static_assert(__is_same(T, __nv_bfloat16));
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  }
  return r;
}

// An accumulator of 16 rows and 8 columns, rounded to T, as the B operand of a product that
// sums over those rows.
template <typename T>
__device__ __forceinline__ void pack_transposed(const float (&tile)[4], uint32_t (&b)[2]) {
  b[0] = transpose_matrix(pack_pair<T>(tile[0], tile[1]));
  b[1] = transpose_matrix(pack_pair<T>(tile[2], tile[3]));
}

// ---- fragments to shared memory (sm_90), the reverse of load_matrices

// Stores four 8 x 8 matrices of 2-byte elements, held as products leave them: of each, lane i has row i / 4,
// columns 2 * (i % 4) and the next. Lane i gives the address of row i % 8 of matrix i / 8, aligned to 16
// bytes. All 32 lanes call.
__device__ __forceinline__ void store_matrices(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// The same, transposed: lane i gives the address of column i % 8 of matrix i / 8.
__device__ __forceinline__ void store_matrices_transposed(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

}  // namespace htree::device
