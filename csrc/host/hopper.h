// Whether a call may take the kernels for sm_90a: for files that nvcc compiles.
#pragma once

#include <ATen/cuda/CUDAContextLight.h>

#include "device/hopper_probe.cuh"

namespace htree {

// Of the current device. The library is asked once, by the first call on an sm_90 device: another device of
// the process must not answer for it.
inline bool has_hopper_kernels() {
  const cudaDeviceProp* properties = at::cuda::getCurrentDeviceProperties();
  if (properties->major != 9 || properties->minor != 0) {
    return false;
  }
  static const bool compiled = device::hopper_kernels_compiled();
  return compiled;
}

}  // namespace htree
