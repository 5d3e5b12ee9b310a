// Whether a call may take the kernels for sm_90a.
#pragma once

#include <ATen/cuda/CUDAContextLight.h>

#include "host/cuda/kernel_launch.h"
#include "host/cuda/probes.h"

namespace htree {

// Answers for the current device. The library is asked once, by the first call on an sm_90 device, so that
// another device of the process does not answer for it.
inline bool has_hopper_kernels() {
  const cudaDeviceProp* properties = at::cuda::getCurrentDeviceProperties();
  if (properties->major != 9 || properties->minor != 0) {
    return false;
  }
  static const bool compiled = device::hopper_kernels_compiled();
  return compiled;
}

// The most blocks that a launch may have to overlap its neighbours (LaunchShape::overlaps): one for each
// multiprocessor, where all of them find room beside the other kernel's; none for other code, which would not wait.
inline int most_overlapping_blocks() {
  return has_hopper_kernels() ? at::cuda::getCurrentDeviceProperties()->multiProcessorCount : 0;
}

// The most blocks of a cluster: 16 where the device has them side by side. It is asked once, like
// has_hopper_kernels(), and only where that is true.
inline int most_cluster_blocks() {
  static const int most = device::holds_cluster(16) ? 16 : kPortableCluster;
  return most;
}

}  // namespace htree
