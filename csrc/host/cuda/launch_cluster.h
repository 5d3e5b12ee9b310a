// Launch of kernels that need more than 48 KB of shared memory or clusters of blocks. Torch-free.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace htree {

// In clusters of `cluster` blocks along x; `shared` bytes of dynamic shared memory. With `overlaps`, the
// blocks may begin before the kernel in front in the stream has ended, so every thread of theirs calls
// device::wait_for_previous_kernels() before it touches global memory.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_with(bool overlaps, void (*kernel)(Parameters...), dim3 grid, int threads, int shared,
                        int cluster, cudaStream_t stream, const Arguments&... arguments) {
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error != cudaSuccess) {
    return error;
  }
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = static_cast<unsigned>(cluster);
  attributes[0].val.clusterDim.y = 1;
  attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = overlaps ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...);
}

template <typename... Parameters, typename... Arguments>
cudaError_t launch_cluster(void (*kernel)(Parameters...), dim3 grid, int threads, int shared, int cluster,
                           cudaStream_t stream, const Arguments&... arguments) {
  return launch_with(false, kernel, grid, threads, shared, cluster, stream, arguments...);
}

// For at most one block per multiprocessor: where blocks share one, those that begin early would gather on
// few.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_overlapping_cluster(void (*kernel)(Parameters...), dim3 grid, int threads, int shared,
                                       int cluster, cudaStream_t stream, const Arguments&... arguments) {
  return launch_with(true, kernel, grid, threads, shared, cluster, stream, arguments...);
}

}  // namespace htree
