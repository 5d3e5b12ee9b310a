// Written by setup.py from csrc/instances.py.
#include "ops/gated_mlp/cuda/gated_mlp_launch.cuh"

namespace htree::gated_mlp {
template cudaError_t launch_gate_backward(Activation, int64_t, const __nv_bfloat16*, const __nv_bfloat16*, const __nv_bfloat16*, __nv_bfloat16*, __nv_bfloat16*, cudaStream_t);
}  // namespace htree::gated_mlp
