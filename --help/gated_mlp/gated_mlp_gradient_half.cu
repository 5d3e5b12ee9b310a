// Written by setup.py from csrc/instances.py.
#include "ops/gated_mlp/cuda/gated_mlp_launch.cuh"

namespace htree::gated_mlp {
template cudaError_t launch_input_gradient(const InputGradientParams<__half>&, cudaStream_t);
template cudaError_t launch_weight_gradients(const WeightGradientParams<__half>&, cudaStream_t);
}  // namespace htree::gated_mlp
