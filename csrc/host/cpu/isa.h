// Chooses the instruction set of the CPU kernels at run time.
//
// A family's hot loops stand in one torch-free header, which is compiled once per instruction set, in generated
// files that differ only in the macro above host/cpu/simd.h. Each file defines a table of function pointers,
// and `pick_isa` chooses one. No compiler flag of the whole library depends on the machine it was built on.
#pragma once

#include <c10/util/Exception.h>

#include "host/env.h"

namespace htree {

enum class Isa { kBaseline, kAvx2, kAvx512, kAvx512Bf16 };

inline Isa detect_isa() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const bool pairs = avx512 && __builtin_cpu_supports("avx512bf16");
  return pairs ? Isa::kAvx512Bf16 : avx512 ? Isa::kAvx512 : avx2 ? Isa::kAvx2 : Isa::kBaseline;
#else
  return Isa::kBaseline;
#endif
}

// Whether the products of pairs of bf16 are faster than those of fp32. Measured, see
// csrc/ops/gated_mlp/README.md: on AMD they take little more than half the time, on Intel a third more.
inline bool has_fast_pairs() {
#if defined(__x86_64__)
  return __builtin_cpu_is("amd");
#else
  return false;
#endif
}

// Whether the CPU has tiles of bf16, by which the BLAS library multiplies many times faster than fp32.
inline bool has_bf16_tiles() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("amx-bf16");
#else
  return false;
#endif
}

// The fastest instruction set of this CPU, or the best one up to what
// HTREE_CPU_ISA=baseline|avx2|avx512|avx512_bf16 asks for.
inline Isa active_isa() {
  static const Isa isa = [] {
    const Isa best = detect_isa();
    const std::string wish = env_or("HTREE_CPU_ISA", has_fast_pairs() ? "avx512_bf16" : "avx512");
    TORCH_CHECK_VALUE(wish == "baseline" || wish == "avx2" || wish == "avx512" || wish == "avx512_bf16",
                      "HTREE_CPU_ISA must be baseline, avx2, avx512 or avx512_bf16, got ", wish);
    const Isa limit = wish == "baseline" ? Isa::kBaseline
                      : wish == "avx2"   ? Isa::kAvx2
                      : wish == "avx512" ? Isa::kAvx512
                                         : Isa::kAvx512Bf16;
    return limit < best ? limit : best;
  }();
  return isa;
}

// A family has no table of its own for AVX512_BF16. The few kernels that multiply pairs of bf16
// with it ask active_isa().
template <typename Table>
const Table& pick_isa(const Table& baseline, const Table& avx2, const Table& avx512) {
  switch (active_isa()) {
    case Isa::kAvx512Bf16:
    case Isa::kAvx512:
      return avx512;
    case Isa::kAvx2:
      return avx2;
    case Isa::kBaseline:
      break;
  }
  return baseline;
}

}  // namespace htree

// HTREE_PICK_ISA(kName) is the best of the tables kNameBaseline, kNameAvx2 and kNameAvx512. Only the first
// exists where the CPU is not an x86-64.
#if defined(__x86_64__)
#define HTREE_PICK_ISA(name) ::htree::pick_isa(name##Baseline, name##Avx2, name##Avx512)
#else
#define HTREE_PICK_ISA(name) (name##Baseline)
#endif
