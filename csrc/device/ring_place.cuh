// Where a thread stands in a ring of stages in shared memory, each with a barrier that counts phases
// (mbarrier.cuh).
#pragma once

#include <cstdint>

namespace htree::device {

// A stage of the ring and the parity of its phase; who fills and who reads each carry their own from tile to
// tile.
template <int kStages>
struct RingPlace {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

}  // namespace htree::device
