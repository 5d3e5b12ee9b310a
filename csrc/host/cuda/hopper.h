// Whether a call may take the kernels for sm_90a.
#pragma once

#include <ATen/cuda/CUDAContextLight.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAMacros.h>
#include <c10/util/CallOnce.h>

#include <array>

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

// The most blocks that a launch with PDL (LaunchShape::pdl) may have: one for each
// multiprocessor, where all of them find space beside the other kernel's; none for other code, which would not wait.
inline int most_pdl_blocks() {
  return has_hopper_kernels() ? at::cuda::getCurrentDeviceProperties()->multiProcessorCount : 0;
}

// Of the current device; all 0 where the kernels for sm_90a do not run. Each device is asked once.
inline const ClusterCounts& clusters_at_once() {
  static const ClusterCounts none{};
  if (!has_hopper_kernels()) {
    return none;
  }
  static std::array<c10::once_flag, C10_COMPILE_TIME_MAX_GPUS> asked;
  static std::array<ClusterCounts, C10_COMPILE_TIME_MAX_GPUS> counts;
  const auto device = static_cast<size_t>(c10::cuda::current_device());
  c10::call_once(asked.at(device), [&] { counts[device] = device::count_clusters(); });
  return counts[device];
}

}  // namespace htree
