// Whether a call may take the kernels for sm_90a: for files that nvcc compiles.
#pragma once

#include <ATen/cuda/CUDAContextLight.h>
#include <cuda_runtime.h>

#include "device/hopper/wgmma.cuh"

namespace htree {
namespace device {

// Has static shared memory where the bodies are compiled in: sm_90a, not sm_90 or PTX
// that the driver compiled.
template <int = 0>
__global__ void hopper_probe_kernel() {
#if HTREE_SM90A
  __shared__ volatile int present;
  present = 1;
#endif
}

// Of the device code beside which this is compiled. Attributes only, no launch; safe
// while a graph is captured.
inline bool hopper_kernels_compiled() {
  cudaFuncAttributes attributes;
  if (cudaFuncGetAttributes(&attributes, hopper_probe_kernel<>) != cudaSuccess) {
    cudaGetLastError();  // no code for this device at all; the launch that follows says so
    return false;
  }
  return attributes.sharedSizeBytes > 0;
}

}  // namespace device

// Of the current device. This library is asked once, by the first call on an sm_90 device: another device of
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
