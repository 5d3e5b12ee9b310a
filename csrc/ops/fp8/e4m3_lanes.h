// The values of E4M3FN codes, a vector at a time. Include after host/cpu/simd.h.
#pragma once

#include "host/cpu/simd.h"

namespace htree::HTREE_ISA {

typedef uint8_t VecB __attribute__((vector_size(HTREE_LANES)));

// From bytes to lanes and back; a lane holds a code in its lowest byte. GCC 12 makes one instruction per
// element of __builtin_convertvector.
inline VecI widen(VecB bytes) {
#if HTREE_LANES == 16
  return (VecI)_mm512_cvtepu8_epi32((__m128i)bytes);
#elif HTREE_LANES == 8
  int64_t low;
  std::memcpy(&low, &bytes, sizeof low);
  return (VecI)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(low));
#else
  return __builtin_convertvector(bytes, VecI);
#endif
}
inline VecB narrow_to_bytes(VecI code) {
#if HTREE_LANES == 8
  const __m128i words = (__m128i)narrow(code);
  const int64_t low = _mm_cvtsi128_si64(_mm_packus_epi16(words, words));
  VecB bytes;
  std::memcpy(&bytes, &low, sizeof bytes);
  return bytes;
#else
  return __builtin_convertvector(code, VecB);
#endif
}

// The values of codes in the low bytes. Subnormal codes do not pass through subnormal floats.
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
  return widen(bytes);
}
inline VecI load_codes(const uint8_t* p, SomeLanes lanes) {
  VecB bytes = {};
  std::memcpy(&bytes, p, static_cast<size_t>(lanes.count));
  return widen(bytes);
}

}  // namespace htree::HTREE_ISA
