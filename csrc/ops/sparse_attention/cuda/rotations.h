// Kernels that rotate, and those for keys and queries that stand where they are: own positions, and a caller's lists.
#pragma once

#include <cuda_fp16.h>

#include <type_traits>

namespace htree::tree_attention {

// Calls f(true_type) where there is a table of rotations, else f(false_type): nothing is rotated then, and kernels of their
// own neither load factors nor multiply by them.
template <typename F>
auto dispatch_rotations(const __half2* rotations, F&& f) {
  return rotations ? f(std::true_type{}) : f(std::false_type{});
}

}  // namespace htree::tree_attention
