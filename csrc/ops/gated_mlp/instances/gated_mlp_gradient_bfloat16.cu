#include "ops/gated_mlp/instances/launch_gradient.cuh"

namespace htree::gated_mlp {
template cudaError_t launch_input_gradient(const InputGradientParams<__nv_bfloat16>&, cudaStream_t);
template cudaError_t launch_weight_gradients(const WeightGradientParams<__nv_bfloat16>&, cudaStream_t);
}  // namespace htree::gated_mlp
