// The numbers of the format E4M3FN and the rule for its scales, for host
// and device. docs/semantics/fp8.md §3.3
#pragma once

namespace htree::fp8 {

constexpr float kMaxValue = 448.0f;
// The largest magnitude that still rounds to 448: half way to 480, a number that the format lacks.
constexpr float kRoundingLimit = 464.0f;
constexpr float kMinScale = 0x1p-126f;
constexpr float kMaxScale = 0x1p127f;

// The scale, a factor, that takes the largest finite magnitude to 448. It is 1 where that magnitude is 0.
constexpr float scale_of(float largest) {
  if (largest == 0.0f) {
    return 1.0f;
  }
  const float scale = kMaxValue / largest;
  return scale < kMinScale ? kMinScale : scale > kMaxScale ? kMaxScale : scale;
}

}  // namespace htree::fp8
