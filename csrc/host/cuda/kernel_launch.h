// The one launcher of CUDA kernels: it asks for shared memory and a cluster,
// launches, and checks. Torch-free.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "device/sizes.h"

namespace htree {

// An attribute of the current device.
inline cudaError_t device_attribute(cudaDeviceAttr attribute, int& value) {
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  return error != cudaSuccess ? error : cudaDeviceGetAttribute(&value, attribute, device);
}

// How a kernel is launched.
struct LaunchShape {
  dim3 grid;
  int threads = 0;           // threads of a block along x
  int64_t shared_bytes = 0;  // dynamic shared memory of a block
  int cluster = 1;           // blocks of a cluster along x; more than 1 needs sm_90
  // Programmatic dependent launch, device/sm90/pdl.cuh: the blocks may begin before the previous kernel of the
  // stream has ended (sm_90), so every thread must
  // call device::pdl_wait() before it touches global memory, or, where it has nothing in common
  // with that kernel and that one is launched without PDL, before it ends. For at most one block per
  // multiprocessor: where blocks share one, those that begin early would crowd on a few of them.
  bool pdl = false;
  int thread_rows = 1;  // threads of a block along y
};

// A block may have 48 KB of shared memory without asking. Static shared memory is part of it; no kernel with
// dynamic shared memory declares more than 8 KB.
constexpr int64_t kFreeSharedBytes = (48 - 8) * 1024;

// Allows the kernel `bytes` of dynamic shared memory on the current device. It is called before every launch:
// the permission belongs to a device, and asking costs little beside a launch.
template <typename Kernel>
cudaError_t allow_shared_bytes(Kernel* kernel, int64_t bytes) {
  if (bytes <= kFreeSharedBytes) {
    return cudaSuccess;
  }
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes));
}

// Allows the kernel clusters of `cluster` blocks on the current device.
template <typename Kernel>
cudaError_t allow_cluster(Kernel* kernel, int cluster) {
  return cluster <= device::kPortableCluster
             ? cudaSuccess
             : cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
}

// Returns what the launch returned. An error inside the kernel shows later, as everywhere in CUDA.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_kernel(void (*kernel)(Parameters...), const LaunchShape& shape, cudaStream_t stream,
                          const Arguments&... arguments) {
  if (const cudaError_t error = allow_shared_bytes(kernel, shape.shared_bytes); error != cudaSuccess) {
    return error;
  }
  if (const cudaError_t error = allow_cluster(kernel, shape.cluster); error != cudaSuccess) {
    return error;
  }
  cudaLaunchAttribute attributes[2]{};
  unsigned num_attributes = 0;
  if (shape.cluster > 1) {
    cudaLaunchAttribute& cluster = attributes[num_attributes++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = static_cast<unsigned>(shape.cluster);
    cluster.val.clusterDim.y = 1;
    cluster.val.clusterDim.z = 1;
  }
  if (shape.pdl) {
    cudaLaunchAttribute& pdl = attributes[num_attributes++];
    pdl.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    pdl.val.programmaticStreamSerializationAllowed = 1;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = dim3(static_cast<unsigned>(shape.threads), static_cast<unsigned>(shape.thread_rows));
  config.dynamicSmemBytes = static_cast<size_t>(shape.shared_bytes);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = num_attributes;
  return cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
}

}  // namespace htree
