// Torch-free launchers of the family, one set per storage type; csrc/instances.py lists them.
#pragma once

#include <cuda_runtime_api.h>

#include "ops/rmsnorm_rope/rmsnorm_rope_config.h"
#include "ops/rmsnorm_rope/rmsnorm_rope_params.h"

namespace htree::rmsnorm_rope {

// Launch `blocks` blocks (num_blocks() of the configuration) on `stream`; cudaErrorNotSupported where
// `config` is not compiled. `pdl`: see LaunchShape; the looping kernel takes no notice.
template <typename T>
cudaError_t launch_forward(const KernelConfig& config, const ForwardParams<T>& params, int blocks, bool pdl,
                           cudaStream_t stream);
template <typename T>
cudaError_t launch_backward(const KernelConfig& config, const BackwardParams<T>& params, int blocks,
                            cudaStream_t stream);
template <typename A>
cudaError_t launch_sum(const SumParams<A>& params, cudaStream_t stream);

}  // namespace htree::rmsnorm_rope
