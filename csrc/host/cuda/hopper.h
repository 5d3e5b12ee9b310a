// Whether a call may take the kernels for sm_90a. For files that nvcc compiles.
#pragma once

#include <ATen/cuda/CUDAContextLight.h>
#include <cuda_runtime.h>

#include "device/hopper/wgmma.cuh"

namespace htree {
namespace device {

// Has static shared memory where the bodies of the Hopper kernels are compiled in: for sm_90a, not for sm_90
// or for PTX that the driver compiled.
template <int = 0>
__global__ void hopper_probe_kernel() {
#if HTREE_SM90A
  __shared__ volatile int present;
  present = 1;
#endif
}

// Answers for the device code that is linked with this function. It asks for attributes and launches nothing,
// so it is safe while a graph is captured.
inline bool hopper_kernels_compiled() {
  cudaFuncAttributes attributes;
  if (cudaFuncGetAttributes(&attributes, hopper_probe_kernel<>) != cudaSuccess) {
    cudaGetLastError();  // no code for this device at all: the launch that follows reports it
    return false;
  }
  return attributes.sharedSizeBytes > 0;
}

}  // namespace device

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

}  // namespace htree
