// Launch shapes of the elementwise kernels: a grid-stride loop over `num` items, never more blocks than the x
// dimension of a grid holds or than fill any GPU many times over.
#pragma once

#include <algorithm>
#include <cstdint>

namespace htree::tree_attention {

constexpr int kElementThreads = 256;

inline unsigned blocks_for(int64_t num, int threads = kElementThreads) {
  return static_cast<unsigned>(std::min<int64_t>((num + threads - 1) / threads, int64_t{1} << 20));
}

}  // namespace htree::tree_attention
