// Written by setup.py from csrc/instances.py.
#include "ops/fp8/quantize/quantize_launch.cuh"

namespace htree::fp8 {
template cudaError_t launch_quantize<__nv_bfloat16>(const QuantizeArgs<__nv_bfloat16>&, cudaStream_t);
template cudaError_t launch_dequantize<__nv_bfloat16>(const ApplyArgs<uint8_t, __nv_bfloat16>&, cudaStream_t);
template cudaError_t launch_fake_backward<__nv_bfloat16>(const ApplyArgs<__nv_bfloat16, __nv_bfloat16>&, cudaStream_t);
}  // namespace htree::fp8
