// The wgmma instructions, one function each. Macros write them out because a template cannot compute an asm
// string. Callers use wgmma() of device/sm90/wgmma.cuh, which documents operands and layouts.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

namespace htree::device {

template <typename T, int N>
struct WgmmaInstruction;  // N is 8, 16, 32, 64, 80, 96, 128, 144, 160, 176, 192, 224 or 256

// The operands %0 ... %(count - 1), and the accumulators they stand for.
#define HTREE_REGISTERS_4 "%0, %1, %2, %3"
#define HTREE_REGISTERS_8 \
  HTREE_REGISTERS_4       \
  ", "                    \
  "%4, %5, %6, %7"
#define HTREE_REGISTERS_16 \
  HTREE_REGISTERS_8        \
  ", "                     \
  "%8, %9, %10, %11, %12, %13, %14, %15"
#define HTREE_REGISTERS_32 \
  HTREE_REGISTERS_16       \
  ", "                     \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define HTREE_REGISTERS_40 \
  HTREE_REGISTERS_32       \
  ", "                     \
  "%32, %33, %34, %35, %36, %37, %38, %39"
#define HTREE_REGISTERS_48 \
  HTREE_REGISTERS_32       \
  ", "                     \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define HTREE_REGISTERS_64 \
  HTREE_REGISTERS_48       \
  ", "                     \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define HTREE_REGISTERS_72 \
  HTREE_REGISTERS_64       \
  ", "                     \
  "%64, %65, %66, %67, %68, %69, %70, %71"
#define HTREE_REGISTERS_80 \
  HTREE_REGISTERS_64       \
  ", "                     \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define HTREE_REGISTERS_88 \
  HTREE_REGISTERS_80       \
  ", "                     \
  "%80, %81, %82, %83, %84, %85, %86, %87"
#define HTREE_REGISTERS_96 \
  HTREE_REGISTERS_88       \
  ", "                     \
  "%88, %89, %90, %91, %92, %93, %94, %95"
#define HTREE_REGISTERS_112 \
  HTREE_REGISTERS_96        \
  ", "                      \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define HTREE_REGISTERS_128 \
  HTREE_REGISTERS_112       \
  ", "                      \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define HTREE_D4(d, i) "+f"(d[i]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3])
#define HTREE_D8(d, i) HTREE_D4(d, i), HTREE_D4(d, (i) + 4)
#define HTREE_D16(d, i) HTREE_D8(d, i), HTREE_D8(d, (i) + 8)
#define HTREE_D32(d, i) HTREE_D16(d, i), HTREE_D16(d, (i) + 16)
#define HTREE_ACCUMULATORS_4 HTREE_D4(d, 0)
#define HTREE_ACCUMULATORS_8 HTREE_D8(d, 0)
#define HTREE_ACCUMULATORS_16 HTREE_D16(d, 0)
#define HTREE_ACCUMULATORS_32 HTREE_D32(d, 0)
#define HTREE_ACCUMULATORS_40 HTREE_D32(d, 0), HTREE_D8(d, 32)
#define HTREE_ACCUMULATORS_48 HTREE_D32(d, 0), HTREE_D16(d, 32)
#define HTREE_ACCUMULATORS_64 HTREE_D32(d, 0), HTREE_D32(d, 32)
#define HTREE_ACCUMULATORS_72 HTREE_ACCUMULATORS_64, HTREE_D8(d, 64)
#define HTREE_ACCUMULATORS_80 HTREE_ACCUMULATORS_64, HTREE_D16(d, 64)
#define HTREE_ACCUMULATORS_88 HTREE_ACCUMULATORS_80, HTREE_D8(d, 80)
#define HTREE_ACCUMULATORS_96 HTREE_ACCUMULATORS_64, HTREE_D32(d, 64)
#define HTREE_ACCUMULATORS_112 HTREE_ACCUMULATORS_96, HTREE_D16(d, 96)
#define HTREE_ACCUMULATORS_128 HTREE_ACCUMULATORS_96, HTREE_D32(d, 96)

// P0, P1, ... are the numbers of the operands behind the accumulators. SHAPE ends the opcode. The FLAGS say
// how the majorness of shared-memory operands is passed; 1-byte types have no such flags.
#define HTREE_WGMMA(T, N, COUNT, SHAPE, SHARED_FLAGS, REGISTER_FLAGS, P0, P1, P2, P3, P4, P5)               \
  template <>                                                                                               \
  struct WgmmaInstruction<T, N> {                                                                           \
    template <int kMajorA, int kMajorB>                                                                     \
    static __device__ __forceinline__ void shared(float (&d)[COUNT], uint64_t a, uint64_t b,                \
                                                  bool accumulate) {                                        \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P2                                                 \
                   ", 0;\n"                                                                                 \
                   "wgmma.mma_async.sync.aligned.m64n" #N SHAPE " {" HTREE_REGISTERS_##COUNT                \
                   "}, %" #P0 ", %" #P1 ", p, 1, 1" SHARED_FLAGS ";\n}"                                     \
                   : HTREE_ACCUMULATORS_##COUNT                                                             \
                   : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(kMajorA), "n"(kMajorB));        \
    }                                                                                                       \
    template <int kMajorB>                                                                                  \
    static __device__ __forceinline__ void registers(float (&d)[COUNT], const uint32_t (&a)[4], uint64_t b, \
                                                     bool accumulate) {                                     \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P5                                                 \
                   ", 0;\n"                                                                                 \
                   "wgmma.mma_async.sync.aligned.m64n" #N SHAPE " {" HTREE_REGISTERS_##COUNT                \
                   "}, {%" #P0 ", %" #P1 ", %" #P2 ", %" #P3 "}, %" #P4 ", p, 1, 1" REGISTER_FLAGS ";\n}"   \
                   : HTREE_ACCUMULATORS_##COUNT                                                             \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)), \
                     "n"(kMajorB));                                                                         \
    }                                                                                                       \
  };
#define HTREE_WGMMA_TYPES(N, COUNT, P0, P1, P2, P3, P4, P5, P6)                                             \
  HTREE_WGMMA(__nv_bfloat16, N, COUNT, "k16.f32.bf16.bf16", ", %" #P3 ", %" #P4, ", %" #P6, P0, P1, P2, P3, \
              P4, P5)                                                                                       \
  HTREE_WGMMA(__half, N, COUNT, "k16.f32.f16.f16", ", %" #P3 ", %" #P4, ", %" #P6, P0, P1, P2, P3, P4, P5)  \
  HTREE_WGMMA(__nv_fp8_e4m3, N, COUNT, "k32.f32.e4m3.e4m3", "", "", P0, P1, P2, P3, P4, P5)

HTREE_WGMMA_TYPES(8, 4, 4, 5, 6, 7, 8, 9, 10)
HTREE_WGMMA_TYPES(16, 8, 8, 9, 10, 11, 12, 13, 14)
HTREE_WGMMA_TYPES(32, 16, 16, 17, 18, 19, 20, 21, 22)
HTREE_WGMMA_TYPES(64, 32, 32, 33, 34, 35, 36, 37, 38)
HTREE_WGMMA_TYPES(80, 40, 40, 41, 42, 43, 44, 45, 46)
HTREE_WGMMA_TYPES(96, 48, 48, 49, 50, 51, 52, 53, 54)
HTREE_WGMMA_TYPES(128, 64, 64, 65, 66, 67, 68, 69, 70)
HTREE_WGMMA_TYPES(144, 72, 72, 73, 74, 75, 76, 77, 78)
HTREE_WGMMA_TYPES(160, 80, 80, 81, 82, 83, 84, 85, 86)
HTREE_WGMMA_TYPES(176, 88, 88, 89, 90, 91, 92, 93, 94)
HTREE_WGMMA_TYPES(192, 96, 96, 97, 98, 99, 100, 101, 102)
HTREE_WGMMA_TYPES(224, 112, 112, 113, 114, 115, 116, 117, 118)
HTREE_WGMMA_TYPES(256, 128, 128, 129, 130, 131, 132, 133, 134)

#undef HTREE_REGISTERS_4
#undef HTREE_REGISTERS_8
#undef HTREE_REGISTERS_16
#undef HTREE_REGISTERS_32
#undef HTREE_REGISTERS_40
#undef HTREE_REGISTERS_48
#undef HTREE_REGISTERS_64
#undef HTREE_REGISTERS_72
#undef HTREE_REGISTERS_80
#undef HTREE_REGISTERS_88
#undef HTREE_REGISTERS_96
#undef HTREE_REGISTERS_112
#undef HTREE_REGISTERS_128
#undef HTREE_ACCUMULATORS_4
#undef HTREE_ACCUMULATORS_8
#undef HTREE_ACCUMULATORS_16
#undef HTREE_ACCUMULATORS_32
#undef HTREE_ACCUMULATORS_40
#undef HTREE_ACCUMULATORS_48
#undef HTREE_ACCUMULATORS_64
#undef HTREE_ACCUMULATORS_72
#undef HTREE_ACCUMULATORS_80
#undef HTREE_ACCUMULATORS_88
#undef HTREE_ACCUMULATORS_96
#undef HTREE_ACCUMULATORS_112
#undef HTREE_ACCUMULATORS_128
#undef HTREE_D4
#undef HTREE_D8
#undef HTREE_D16
#undef HTREE_D32
#undef HTREE_WGMMA_TYPES
#undef HTREE_WGMMA

}  // namespace htree::device
