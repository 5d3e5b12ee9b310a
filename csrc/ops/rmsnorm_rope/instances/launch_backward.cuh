#pragma once

#include "ops/rmsnorm_rope/instances/launch.cuh"

namespace htree::rmsnorm_rope {

template <typename T>
bool launch_backward(const KernelConfig& config, const BackwardParams<T>& params, int blocks,
                     cudaStream_t stream) {
  const auto run = [&](auto instance) { instance.backward(config, params, blocks, stream); };
  return Automatic<T>::run(config, run);
}

}  // namespace htree::rmsnorm_rope
