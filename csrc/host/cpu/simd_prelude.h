// Everything that headers of CPU kernels use from elsewhere, included before the instruction set is raised.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// GCC 12 warns about the undefined vector inside its own AVX-512 headers (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

namespace htree {

// Storage of the two half formats, with the layout of c10::Half and c10::BFloat16.
struct Fp16 {
  uint16_t bits;
};
struct Bf16 {
  uint16_t bits;
};

}  // namespace htree
