// Index keys in one byte a channel: E4M3 codes times a power of two for each row. For CPU and CUDA. No torch.
// docs/semantics/tree_cache.md §7.7
#pragma once

#include <cstdint>
#include <cstring>

#include "ops/tree/tree_args.h"

namespace htree::tree_cache {

// The powers of two that a scale may be: with them every code times its scale is a normal bf16 number, or 0.
constexpr int kLeastExponent = -117, kMostExponent = 119;
constexpr int kExponentBias = 127;  // a scale is kept as its biased exponent, as in E8M0

// The scale of a row whose largest magnitude is `largest`, not NaN: the least power of two with
// largest <= 448 * 2^e, 448 being the largest code.
HTREE_HOST_DEVICE uint8_t index_scale(float largest) {
  uint32_t bits;
  memcpy(&bits, &largest, sizeof bits);
  constexpr uint32_t kMostMantissa = 0x600000;  // of 448 = 1.75 * 2^8
  const int exponent = static_cast<int>(bits >> 23) - 127 - ((bits & 0x7fffff) <= kMostMantissa ? 8 : 7);
  const int kept = exponent < kLeastExponent  ? kLeastExponent
                   : exponent > kMostExponent ? kMostExponent
                                              : exponent;
  return static_cast<uint8_t>(kept + kExponentBias);
}

HTREE_HOST_DEVICE float scale_value(uint8_t scale) {
  const uint32_t bits = uint32_t{scale} << 23;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// What is rounded to a code. NaN stays, what is larger than all codes becomes the largest.
HTREE_HOST_DEVICE float scaled_channel(float x, uint8_t scale) {
  const float scaled = x * scale_value(static_cast<uint8_t>(2 * kExponentBias - scale));
  return scaled > 448.0f ? 448.0f : scaled < -448.0f ? -448.0f : scaled;
}

}  // namespace htree::tree_cache
