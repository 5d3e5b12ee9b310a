// Whether kernels that guard their body with `#if HTREE_SM90A` have one on the current device.
#pragma once

#include <cuda_runtime.h>

#include "device/wgmma.cuh"

namespace htree::device {

// Has static shared memory where the bodies are compiled in: sm_90a, not sm_90 or PTX that the driver
// compiled.
template <int = 0>
__global__ void hopper_probe_kernel() {
#if HTREE_SM90A
  __shared__ volatile int present;
  present = 1;
#endif
}

// Of the device code beside which this is compiled. Attributes only, no launch; safe while a graph is
// captured.
inline bool hopper_kernels_compiled() {
  cudaFuncAttributes attributes;
  if (cudaFuncGetAttributes(&attributes, hopper_probe_kernel<>) != cudaSuccess) {
    cudaGetLastError();  // no code for this device at all; the launch that follows says so
    return false;
  }
  return attributes.sharedSizeBytes > 0;
}

}  // namespace htree::device
