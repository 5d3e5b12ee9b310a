// Values of E4M3FN codes a vector at a time. Include after a host/simd_*.h.
#pragma once

#include "host/simd_lanes.h"

namespace htree::HTREE_ISA {

typedef uint8_t VecB __attribute__((vector_size(HTREE_LANES)));

// Values of codes in the low bytes; subnormal codes do not pass through subnormal floats.
inline VecF decode(VecI code) {
  const VecI magnitude = code & 0x7f;
  const VecI normal = (magnitude << 20) + (120 << 23);
  const VecI tiny = as_int(__builtin_convertvector(magnitude, VecF) * 0x1p-9f);
  const VecI value = magnitude < 8 ? tiny : magnitude == 0x7f ? (VecI{} + 0x7fc00000) : normal;
  return as_float(value | (code & 0x80) << 24);
}

inline VecI load_codes(const uint8_t* p, AllLanes) {
  VecB bytes;
  std::memcpy(&bytes, p, sizeof bytes);
  return __builtin_convertvector(bytes, VecI);
}
inline VecI load_codes(const uint8_t* p, SomeLanes lanes) {
  VecB bytes = {};
  std::memcpy(&bytes, p, static_cast<size_t>(lanes.count));
  return __builtin_convertvector(bytes, VecI);
}

}  // namespace htree::HTREE_ISA
