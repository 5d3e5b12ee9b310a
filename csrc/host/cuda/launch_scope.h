// What every CUDA launcher needs around its launch: the device of its tensors, their current
// stream, and the check.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

namespace htree {

// Makes the tensor's device the current one for its lifetime.
class LaunchScope {
 public:
  explicit LaunchScope(const at::Tensor& tensor) : guard_(tensor.device()) {}
  cudaStream_t stream() const { return c10::cuda::getCurrentCUDAStream().stream(); }

  // The most shared memory that a block may ask for on this device.
  int shared_bytes() const {
    int bytes = 0;
    C10_CUDA_CHECK(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin,
                                          guard_.current_device().index()));
    return bytes;
  }

 private:
  c10::cuda::CUDAGuard guard_;
};

}  // namespace htree
