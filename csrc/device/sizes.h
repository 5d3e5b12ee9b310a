// Arithmetic on sizes and limits of them, for launches and the choice of kernels on the host. No CUDA.
#pragma once

#include <cstdint>

namespace htree {

// a >= 0, b > 0; no intermediate result overflows.
constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return a / b + (a % b != 0);
}

}  // namespace htree

namespace htree::device {

constexpr int kHopperSharedBytes = 227 * 1024;  // the most dynamic shared memory of a block on Hopper
constexpr int kPortableCluster = 8;             // blocks of a cluster; a kernel must ask for more

}  // namespace htree::device
