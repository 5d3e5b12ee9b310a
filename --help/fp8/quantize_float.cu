// Written by setup.py from csrc/instances.py.
#include "ops/fp8/quantize/quantize_launch.cuh"

namespace htree::fp8 {
template cudaError_t launch_quantize<float>(const QuantizeArgs<float>&, cudaStream_t);
template cudaError_t launch_dequantize<float>(const ApplyArgs<uint8_t, float>&, cudaStream_t);
template cudaError_t launch_fake_backward<float>(const ApplyArgs<float, float>&, cudaStream_t);
}  // namespace htree::fp8
