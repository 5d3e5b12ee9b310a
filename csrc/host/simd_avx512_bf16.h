// First include of a translation unit of CPU kernels that use AVX512_BF16; see simd_avx512.h for why the
// order matters.
#pragma once
#include "host/simd_prelude.h"
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c,prefer-vector-width=512")
#define HTREE_ISA isa_avx512_bf16
#define HTREE_LANES 16
#include "host/simd.h"
