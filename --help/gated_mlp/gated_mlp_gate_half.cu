// Written by setup.py from csrc/instances.py.
#include "ops/gated_mlp/cuda/gated_mlp_launch.cuh"

namespace htree::gated_mlp {
template cudaError_t launch_gate(Activation, int64_t, const float*, const float*, __half*, cudaStream_t);
template cudaError_t launch_gate_backward(Activation, int64_t, const __half*, const float*, const float*, __half*, __half*, cudaStream_t);
}  // namespace htree::gated_mlp
