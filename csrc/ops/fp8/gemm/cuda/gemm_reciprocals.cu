// The factors by which cuBLAS multiplies: reciprocals of the scales.
#include "device/sizes.h"
#include "device/sm90/pdl.cuh"
#include "host/cuda/kernel_launch.h"
#include "ops/fp8/gemm/cuda/gemm_launch.h"
#include "ops/fp8/gemm/cuda/gemm_scale.cuh"

namespace htree::fp8 {
namespace {

// Where both scales are single: two factors whose product is 1 / (a b), with about equal exponents where it
// is near the bounds of fp32.
__global__ void reciprocals_kernel(GemmScale a, int64_t num_a, float* out_a, GemmScale b, int64_t num_b,
                                   float* out_b) {
  device::pdl_launch_and_wait();
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (num_a + num_b == 2) {
    if (i == 0) {
      const ScaleFactors factors = joint_factors(split_inverse(*a.data), split_inverse(*b.data));
      *out_a = factors.first;
      *out_b = factors.second;
    }
  } else if (i < num_a) {
    out_a[i] = 1.0f / a.data[i * a.stride];
  } else if (i - num_a < num_b) {
    out_b[i - num_a] = 1.0f / b.data[(i - num_a) * b.stride];
  }
}

}  // namespace

cudaError_t launch_reciprocals(GemmScale a, int64_t num_a, float* out_a, GemmScale b, int64_t num_b,
                               float* out_b, bool pdl, cudaStream_t stream) {
  constexpr int kThreads = 128;
  const LaunchShape shape{
      .grid = static_cast<unsigned>(ceil_div(num_a + num_b, kThreads)), .threads = kThreads, .pdl = pdl};
  return launch_kernel(reciprocals_kernel, shape, stream, a, num_a, out_a, b, num_b, out_b);
}

}  // namespace htree::fp8
