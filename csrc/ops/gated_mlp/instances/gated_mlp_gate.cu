// The elementwise kernels for every storage type.
#include "ops/gated_mlp/gate.cuh"
#include "ops/gated_mlp/gated_mlp_launch.h"

namespace htree::gated_mlp {
namespace {

// Enough blocks to fill any GPU; the kernels step over the rest.
unsigned num_gate_blocks(int64_t count) {
  constexpr int64_t kPerBlock = int64_t{kGateThreads} * kGateElements;
  constexpr int64_t kMost = 1 << 14;
  const int64_t blocks = (count + kPerBlock - 1) / kPerBlock;
  return static_cast<unsigned>(blocks < kMost ? blocks : kMost);
}

}  // namespace

template <typename T>
cudaError_t launch_gate(Activation activation, int64_t count, const float* gate, const float* up, T* out,
                        cudaStream_t stream) {
  const auto kernel =
      activation == Activation::kSilu ? gate_kernel<T, Activation::kSilu> : gate_kernel<T, Activation::kGelu>;
  kernel<<<num_gate_blocks(count), kGateThreads, 0, stream>>>(count, gate, up, out);
  return cudaGetLastError();
}

template <typename T, typename P>
cudaError_t launch_gate_backward(Activation activation, int64_t count, const T* dy, const P* gate,
                                 const P* up, T* dgate, T* dup, cudaStream_t stream) {
  const auto kernel = activation == Activation::kSilu ? gate_backward_kernel<T, P, Activation::kSilu>
                                                      : gate_backward_kernel<T, P, Activation::kGelu>;
  kernel<<<num_gate_blocks(count), kGateThreads, 0, stream>>>(count, dy, gate, up, dgate, dup);
  return cudaGetLastError();
}

template cudaError_t launch_gate(Activation, int64_t, const float*, const float*, float*, cudaStream_t);
template cudaError_t launch_gate(Activation, int64_t, const float*, const float*, __half*, cudaStream_t);
template cudaError_t launch_gate(Activation, int64_t, const float*, const float*, __nv_bfloat16*,
                                 cudaStream_t);
template cudaError_t launch_gate_backward(Activation, int64_t, const float*, const float*, const float*,
                                          float*, float*, cudaStream_t);
template cudaError_t launch_gate_backward(Activation, int64_t, const __half*, const float*, const float*,
                                          __half*, __half*, cudaStream_t);
template cudaError_t launch_gate_backward(Activation, int64_t, const __half*, const __half*, const __half*,
                                          __half*, __half*, cudaStream_t);
template cudaError_t launch_gate_backward(Activation, int64_t, const __nv_bfloat16*, const float*,
                                          const float*, __nv_bfloat16*, __nv_bfloat16*, cudaStream_t);
template cudaError_t launch_gate_backward(Activation, int64_t, const __nv_bfloat16*, const __nv_bfloat16*,
                                          const __nv_bfloat16*, __nv_bfloat16*, __nv_bfloat16*, cudaStream_t);

}  // namespace htree::gated_mlp
