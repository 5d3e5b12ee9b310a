// What empty kernels tell about the library and the current device. Apart from hopper.h because nvcc must compile
// the kernels, and torch's headers take it long. Torch-free.
#pragma once

namespace htree::device {

// Whether the bodies of the Hopper kernels are compiled in: for sm_90a, not for sm_90 or for PTX that the driver
// compiled. Answers for the device code that is linked with this function. It asks for attributes and launches
// nothing, so it is safe while a graph is captured.
bool hopper_kernels_compiled();

// Whether the device holds a cluster of so many blocks, each of which has a multiprocessor to itself.
bool holds_cluster(int cluster);

}  // namespace htree::device
