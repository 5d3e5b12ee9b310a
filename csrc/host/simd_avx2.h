// First include of an AVX2 translation unit of CPU kernels; see simd_avx512.h for why the order matters.
#pragma once
#include "host/simd_prelude.h"
#pragma GCC target("avx2,fma,f16c")
#define HTREE_ISA isa_avx2
#define HTREE_LANES 8
#include "host/simd.h"
