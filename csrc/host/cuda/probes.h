// What empty kernels tell about the library and the current device. Apart from hopper.h because nvcc must compile
// the kernels, and torch's headers take it long. Torch-free.
#pragma once

#include <array>

namespace htree {

// [n]: the clusters of n blocks that a device runs at once, where each block has a multiprocessor to itself; 0 where
// it runs none. The blocks of a cluster lie in one part of the GPU, and cards of one model differ in their parts: 132
// multiprocessors may run 15 or 16 clusters of eight blocks, and seven or eight of sixteen. What a device refuses to
// answer counts as none.
using ClusterCounts = std::array<int, 17>;

}  // namespace htree

namespace htree::device {

// Whether the bodies of the Hopper kernels are compiled in: for sm_90a, not for sm_90 or for PTX that the driver
// compiled. Answers for the device code that is linked with this function. It asks for attributes and launches
// nothing, so it is safe while a graph is captured.
bool hopper_kernels_compiled();

// Of the current device, for clusters of 2 blocks and more.
ClusterCounts count_clusters();

}  // namespace htree::device
