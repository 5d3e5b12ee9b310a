// The wgmma instruction for int8 with int32 accumulators, d[64 x 128] = a[64 x 32] * b[32 x 128] + (accumulate ? d : 0).
// Operands, descriptors and the order of use are those of 1-byte types in wgmma.cuh, and d is laid out as there.
#pragma once

#include <cstdint>

namespace htree::device {

#define HTREE_D8(i)                                                                                     \
  "+r"(d[i]), "+r"(d[(i) + 1]), "+r"(d[(i) + 2]), "+r"(d[(i) + 3]), "+r"(d[(i) + 4]), "+r"(d[(i) + 5]), \
      "+r"(d[(i) + 6]), "+r"(d[(i) + 7])

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

}  // namespace htree::device
