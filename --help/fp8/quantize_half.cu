// Written by setup.py from csrc/instances.py.
#include "ops/fp8/quantize/quantize_launch.cuh"

namespace htree::fp8 {
template cudaError_t launch_quantize<__half>(const QuantizeArgs<__half>&, cudaStream_t);
template cudaError_t launch_dequantize<__half>(const ApplyArgs<uint8_t, __half>&, cudaStream_t);
template cudaError_t launch_fake_backward<__half>(const ApplyArgs<__half, __half>&, cudaStream_t);
}  // namespace htree::fp8
