// First include of a baseline translation unit of CPU kernels: what the compiler targets by default (SSE2,
// NEON, ...).
#pragma once
#include "host/simd_prelude.h"
#define HTREE_ISA isa_baseline
#define HTREE_LANES 4
#include "host/simd.h"
