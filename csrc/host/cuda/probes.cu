#include "host/cuda/probes.h"

#include <cuda_runtime.h>

#include "device/sizes.h"
#include "device/sm90/wgmma.cuh"
#include "host/cuda/kernel_launch.h"

namespace htree::device {
namespace {

// Has static shared memory where the bodies of the Hopper kernels are compiled in.
__global__ void hopper_probe_kernel() {
#if HTREE_SM90A
  __shared__ volatile int present;
  present = 1;
#endif
}

__global__ void cluster_probe_kernel() {}

}  // namespace

bool hopper_kernels_compiled() {
  cudaFuncAttributes attributes;
  if (cudaFuncGetAttributes(&attributes, hopper_probe_kernel) != cudaSuccess) {
    cudaGetLastError();  // no code for this device at all: the launch that follows reports it
    return false;
  }
  return attributes.sharedSizeBytes > 0;
}

namespace {

int clusters_at_once(int blocks) {
  auto* kernel = cluster_probe_kernel;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = static_cast<unsigned>(blocks);
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(32);
  config.dynamicSmemBytes = kHopperSharedBytes;
  config.attrs = &attribute;
  config.numAttrs = 1;
  int clusters = 0;
  const bool answered = allow_shared_bytes(kernel, kHopperSharedBytes) == cudaSuccess &&
                        allow_cluster(kernel, blocks) == cudaSuccess &&
                        cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) == cudaSuccess;
  if (!answered) {
    cudaGetLastError();  // a device that refuses the question runs none
  }
  return answered ? clusters : 0;
}

}  // namespace

ClusterCounts count_clusters() {
  ClusterCounts counts{};
  for (int blocks = 2; blocks < static_cast<int>(counts.size()); ++blocks) {
    counts[blocks] = clusters_at_once(blocks);
  }
  return counts;
}

}  // namespace htree::device
