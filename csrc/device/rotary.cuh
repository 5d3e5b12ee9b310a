// Half-split rotation of one pair (low, high): docs/semantics/tree_attention.md §1.4.
#pragma once

namespace htree::device {

// Rotates in place. The inverse rotation takes -sin.
template <typename A>
__device__ __forceinline__ void rotate_pair(A& low, A& high, A cos, A sin) {
  const A rotated = low * cos - high * sin;
  high = low * sin + high * cos;
  low = rotated;
}

}  // namespace htree::device
