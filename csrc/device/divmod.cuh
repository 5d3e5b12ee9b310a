// Division by a number that is fixed for a launch: a multiplication in place of the ~20 instructions of
// a 32-bit division. Granlund and Montgomery, "Division by Invariant Integers using Multiplication",
// PLDI 1994, figure 4.1.
#pragma once

#include <cstdint>

namespace htree::device {

// Divides values below 2^31 by a divisor in [1, 2^31).
class FastDivisor {
 public:
  explicit FastDivisor(uint32_t divisor) : divisor_(divisor) {
    while (shift_ < 31 && (1u << shift_) < divisor) {
      ++shift_;
    }
    multiplier_ =
        static_cast<uint32_t>(((uint64_t{1} << 32) * ((uint64_t{1} << shift_) - divisor)) / divisor + 1);
  }

  __device__ __forceinline__ uint32_t quotient(uint32_t value) const {
    return (__umulhi(value, multiplier_) + value) >> shift_;
  }
  __device__ __forceinline__ uint32_t remainder(uint32_t value, uint32_t quotient) const {
    return value - quotient * divisor_;
  }

 private:
  uint32_t divisor_;
  uint32_t multiplier_;
  uint32_t shift_ = 0;
};

}  // namespace htree::device
