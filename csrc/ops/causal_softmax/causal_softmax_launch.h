// Torch-free launchers of the family, one set per storage type; csrc/instances.py lists them.
#pragma once

#include <cuda_runtime_api.h>

#include "ops/causal_softmax/causal_softmax_config.h"
#include "ops/causal_softmax/causal_softmax_params.h"

namespace htree::causal_softmax {

// Launch on `stream` of the current device; cudaErrorNotSupported where `config` is not compiled.
template <typename T>
cudaError_t launch_forward(const KernelConfig& config, const ForwardParams<T>& params, cudaStream_t stream);
template <typename T>
cudaError_t launch_backward(const KernelConfig& config, const BackwardParams<T>& params, cudaStream_t stream);

}  // namespace htree::causal_softmax
