// The products of fp8_gemm whose widths no other kernel takes; see device/wgmma_instructions.cuh.
#pragma once

#include "device/wgmma_instructions.cuh"

namespace htree::device {

#define HTREE_D8(i)                                                                                     \
  "+f"(d[i]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3]), "+f"(d[(i) + 4]), "+f"(d[(i) + 5]), \
      "+f"(d[(i) + 6]), "+f"(d[(i) + 7])
#define HTREE_D56 \
  HTREE_D8(0), HTREE_D8(8), HTREE_D8(16), HTREE_D8(24), HTREE_D8(32), HTREE_D8(40), HTREE_D8(48)

template <>
struct WgmmaInstruction<__nv_fp8_e4m3, 112> {
  template <int kMajorA, int kMajorB>
  static __device__ __forceinline__ void shared(float (&d)[56], uint64_t a, uint64_t b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %58, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n112k32.f32.e4m3.e4m3 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, "
        "%14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, "
        "%28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "
        "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55"
        "}, %56, %57, p, 1, 1;\n}"
        : HTREE_D56
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
  }
};

template <>
struct WgmmaInstruction<__nv_fp8_e4m3, 144> {
  template <int kMajorA, int kMajorB>
  static __device__ __forceinline__ void shared(float (&d)[72], uint64_t a, uint64_t b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %74, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n144k32.f32.e4m3.e4m3 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, "
        "%14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, "
        "%28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "
        "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, "
        "%56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, "
        "%70, %71"
        "}, %72, %73, p, 1, 1;\n}"
        : HTREE_D56, HTREE_D8(56), HTREE_D8(64)
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
  }
};

#undef HTREE_D8
#undef HTREE_D56

}  // namespace htree::device
