// Matrix products in int8 with int32 sums, which are exact: of a warp from sm_80 on, and of a warpgroup of sm_90a.
// They belong to device/mma.cuh and device/hopper/wgmma.cuh, which say how operands are stored and products waited for.
#pragma once

#include <cstdint>

namespace htree::device {

// c[16 x 8] += a[16 x 32] * b[32 x 8], all 32 lanes. Lane i holds c of rows i / 4 (c0, c1) and i / 4 + 8 (c2, c3),
// columns 2 * (i % 4) and the next. It has four neighbouring elements in a register: of a those that load_matrices()
// gives for rows of 32 bytes, of column i / 4 of b the rows 4 * (i % 4) ... + 3 in b0, and those 16 further down in b1.
__device__ __forceinline__ void mma_int8(int32_t (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#define HTREE_D8(i)                                                                                     \
  "+r"(d[i]), "+r"(d[(i) + 1]), "+r"(d[(i) + 2]), "+r"(d[(i) + 3]), "+r"(d[(i) + 4]), "+r"(d[(i) + 5]), \
      "+r"(d[(i) + 6]), "+r"(d[(i) + 7])

// d[64 x 128] = a[64 x 32] * b[32 x 128] + (accumulate ? d : 0), K-major in shared memory. d is laid out as by wgmma().
__device__ __forceinline__ void wgmma_int8(int32_t (&d)[64], uint64_t a, uint64_t b, bool accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "%64, %65, p;\n}"
      : HTREE_D8(0), HTREE_D8(8), HTREE_D8(16), HTREE_D8(24), HTREE_D8(32), HTREE_D8(40), HTREE_D8(48),
        HTREE_D8(56)
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
}

#undef HTREE_D8

// As pin_registers() of device/hopper/wgmma.cuh.
template <int kCount>
__device__ __forceinline__ void pin_registers(int32_t (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    asm volatile("" : "+r"(d[i])::"memory");
  }
}

}  // namespace htree::device
