// Torch-free launchers of the room, one set per storage type, instantiated in instances/*.cu.
#pragma once

#include <cuda_runtime_api.h>

#include "ops/rmsnorm_rope/rmsnorm_rope_config.h"
#include "ops/rmsnorm_rope/rmsnorm_rope_params.h"

namespace htree::rmsnorm_rope {

// Launch `blocks` blocks (num_blocks of the configuration) on `stream`. False when `config` is not compiled;
// the caller turns that into an error.
template <typename T>
bool launch_forward(const KernelConfig& config, const ForwardParams<T>& params, int blocks,
                    cudaStream_t stream);
template <typename T>
bool launch_backward(const KernelConfig& config, const BackwardParams<T>& params, int blocks,
                     cudaStream_t stream);
template <typename A>
void launch_sum(const SumParams<A>& params, cudaStream_t stream);

}  // namespace htree::rmsnorm_rope
