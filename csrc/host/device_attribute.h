// Facts of the current device for launchers. Torch-free.
#pragma once

#include <cuda_runtime_api.h>

namespace htree {

inline cudaError_t device_attribute(cudaDeviceAttr attribute, int& value) {
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  return error != cudaSuccess ? error : cudaDeviceGetAttribute(&value, attribute, device);
}

}  // namespace htree
