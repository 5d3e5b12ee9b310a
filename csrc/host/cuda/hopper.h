// Whether a call may take the kernels for sm_90a. For files that nvcc compiles.
#pragma once

#include <ATen/cuda/CUDAContextLight.h>
#include <cuda_runtime.h>

#include "device/hopper/wgmma.cuh"
#include "device/sizes.h"
#include "host/cuda/kernel_launch.h"

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

template <int = 0>
__global__ void cluster_probe_kernel() {}

// Whether the device holds a cluster of so many blocks, each of which has a multiprocessor to itself.
inline bool holds_cluster(int cluster) {
  auto* kernel = cluster_probe_kernel<>;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = static_cast<unsigned>(cluster);
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(cluster));
  config.blockDim = dim3(32);
  config.dynamicSmemBytes = kHopperSharedBytes;
  config.attrs = &attribute;
  config.numAttrs = 1;
  int clusters = 0;
  const bool answered = allow_shared_bytes(kernel, kHopperSharedBytes) == cudaSuccess &&
                        allow_cluster(kernel, cluster) == cudaSuccess &&
                        cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) == cudaSuccess;
  if (!answered) {
    cudaGetLastError();  // a device that refuses the question does not hold it
  }
  return answered && clusters > 0;
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

// The most blocks of a cluster: 16 where the device has them side by side. It is asked once, like
// has_hopper_kernels(), and only where that is true.
inline int most_cluster_blocks() {
  static const int most = device::holds_cluster(16) ? 16 : kPortableCluster;
  return most;
}

}  // namespace htree
