// Launch of kernels that need more than 48 KB of shared memory or clusters of blocks. Torch-free.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace htree {

// In clusters of `cluster` blocks along x; `shared` bytes of dynamic shared memory.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_cluster(void (*kernel)(Parameters...), dim3 grid, int threads, int shared, int cluster,
                           cudaStream_t stream, const Arguments&... arguments) {
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error != cudaSuccess) {
    return error;
  }
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = static_cast<unsigned>(cluster);
  attribute.val.clusterDim.y = 1;
  attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
}

}  // namespace htree
