// Sizes of an SM of Hopper, for the choice of kernels on the host and in their static_asserts. No CUDA.
#pragma once

namespace htree::device {

constexpr int kHopperSharedBytes = 227 * 1024;  // most dynamic shared memory of a block

}  // namespace htree::device
