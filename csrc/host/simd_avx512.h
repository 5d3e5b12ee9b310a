// First include of an AVX-512 translation unit of CPU kernels: from here to the end of the file the compiler
// may use AVX-512. Standard headers come before the pragma and the kernels use no inline function of theirs,
// or the linker could keep an AVX-512 copy of a shared inline function for the whole process.
#pragma once
#include "host/simd_prelude.h"
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,prefer-vector-width=512")
#define HTREE_ISA isa_avx512
#define HTREE_LANES 16
#include "host/simd.h"
