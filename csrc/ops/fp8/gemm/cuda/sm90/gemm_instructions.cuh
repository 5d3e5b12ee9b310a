// The products of fp8_gemm in widths that no other kernel uses; see device/sm90/wgmma_instructions.cuh.
#pragma once

#include "device/sm90/wgmma_instructions.cuh"

namespace htree::device {

// The registers of the first accumulators as operands of an instruction, and the accumulators themselves.
#define HTREE_REGISTERS_24                                                                               \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
  "%22, %23"
#define HTREE_REGISTERS_36 \
  HTREE_REGISTERS_24       \
  ", "                     \
  "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35"
#define HTREE_REGISTERS_52                                                                               \
  HTREE_REGISTERS_24                                                                                     \
  ", "                                                                                                   \
  "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, " \
  "%44, %45, %46, %47, %48, %49, %50, %51"
#define HTREE_REGISTERS_56 \
  HTREE_REGISTERS_52       \
  ", "                     \
  "%52, %53, %54, %55"
#define HTREE_REGISTERS_60 \
  HTREE_REGISTERS_56       \
  ", "                     \
  "%56, %57, %58, %59"
#define HTREE_REGISTERS_76 \
  HTREE_REGISTERS_60       \
  ", "                     \
  "%60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75"
#define HTREE_REGISTERS_100                                                                              \
  HTREE_REGISTERS_76                                                                                     \
  ", "                                                                                                   \
  "%76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
  "%96, %97, %98, %99"
#define HTREE_D4(i) "+f"(d[i]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3])
#define HTREE_D12(i) HTREE_D4(i), HTREE_D4((i) + 4), HTREE_D4((i) + 8)
#define HTREE_D24(i) HTREE_D12(i), HTREE_D12((i) + 12)
#define HTREE_ACCUMULATORS_24 HTREE_D24(0)
#define HTREE_ACCUMULATORS_36 HTREE_D24(0), HTREE_D12(24)
#define HTREE_ACCUMULATORS_52 HTREE_D24(0), HTREE_D24(24), HTREE_D4(48)
#define HTREE_ACCUMULATORS_56 HTREE_ACCUMULATORS_52, HTREE_D4(52)
#define HTREE_ACCUMULATORS_60 HTREE_ACCUMULATORS_56, HTREE_D4(56)
#define HTREE_ACCUMULATORS_76 HTREE_D24(0), HTREE_D24(24), HTREE_D24(48), HTREE_D4(72)
#define HTREE_ACCUMULATORS_100 HTREE_ACCUMULATORS_76, HTREE_D24(76)

// A, B and FLAG are the numbers of the operands behind the accumulators.
#define HTREE_FP8_WGMMA(N, COUNT, A, B, FLAG)                                                           \
  template <>                                                                                           \
  struct WgmmaInstruction<__nv_fp8_e4m3, N> {                                                           \
    template <int kMajorA, int kMajorB>                                                                 \
    static __device__ __forceinline__ void shared(float (&d)[COUNT], uint64_t a, uint64_t b,            \
                                                  bool accumulate) {                                    \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #FLAG                                           \
                   ", 0;\n"                                                                             \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" HTREE_REGISTERS_##COUNT \
                   "}, %" #A ", %" #B ", p, 1, 1;\n}"                                                   \
                   : HTREE_ACCUMULATORS_##COUNT                                                         \
                   : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));                                \
    }                                                                                                   \
  };

HTREE_FP8_WGMMA(48, 24, 24, 25, 26)
HTREE_FP8_WGMMA(72, 36, 36, 37, 38)
HTREE_FP8_WGMMA(104, 52, 52, 53, 54)
HTREE_FP8_WGMMA(112, 56, 56, 57, 58)
HTREE_FP8_WGMMA(120, 60, 60, 61, 62)
HTREE_FP8_WGMMA(152, 76, 76, 77, 78)
HTREE_FP8_WGMMA(200, 100, 100, 101, 102)

#undef HTREE_REGISTERS_24
#undef HTREE_REGISTERS_36
#undef HTREE_REGISTERS_52
#undef HTREE_REGISTERS_56
#undef HTREE_REGISTERS_60
#undef HTREE_REGISTERS_76
#undef HTREE_REGISTERS_100
#undef HTREE_D4
#undef HTREE_D12
#undef HTREE_D24
#undef HTREE_ACCUMULATORS_24
#undef HTREE_ACCUMULATORS_36
#undef HTREE_ACCUMULATORS_52
#undef HTREE_ACCUMULATORS_56
#undef HTREE_ACCUMULATORS_60
#undef HTREE_ACCUMULATORS_76
#undef HTREE_ACCUMULATORS_100
#undef HTREE_FP8_WGMMA

}  // namespace htree::device
