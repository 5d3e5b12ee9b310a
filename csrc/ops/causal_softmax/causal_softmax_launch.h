// Torch-free launchers of the room, one set per storage type, instantiated in instances/*.cu.
#pragma once

#include <cuda_runtime_api.h>

#include "ops/causal_softmax/causal_softmax_config.h"
#include "ops/causal_softmax/causal_softmax_params.h"

namespace htree::causal_softmax {

// Launch on `stream`. False when `config` is not compiled; the caller turns that into an error.
template <typename T>
bool launch_forward(const KernelConfig& config, const ForwardParams<T>& params, cudaStream_t stream);
template <typename T>
bool launch_backward(const KernelConfig& config, const BackwardParams<T>& params, cudaStream_t stream);

}  // namespace htree::causal_softmax
