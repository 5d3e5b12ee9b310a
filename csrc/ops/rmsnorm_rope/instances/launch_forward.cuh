#pragma once

#include "ops/rmsnorm_rope/instances/launch.cuh"

namespace htree::rmsnorm_rope {

template <typename T>
bool launch_forward(const KernelConfig& config, const ForwardParams<T>& params, int blocks,
                    cudaStream_t stream) {
  const auto run = [&](auto instance) { instance.forward(config, params, blocks, stream); };
  return Automatic<T>::run(config, run) || Tuned<T>::run(config, run);
}

}  // namespace htree::rmsnorm_rope
