// Torch-free launchers of the gated MLP for __half and __nv_bfloat16 (the elementwise ones for float too);
// csrc/instances.py lists them. They launch on `stream`. cudaErrorNotSupported: the configuration is not
// compiled, or the device cannot run it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ops/gated_mlp/gated_mlp_config.h"
#include "ops/gated_mlp/gated_mlp_params.h"

namespace htree::gated_mlp {

// A matrix whose rows stand `pitch` elements apart, a multiple of 8 (16 bytes). `data` is
// aligned to 16 bytes.
template <typename T>
struct Operand {
  const T* data;
  int64_t pitch;
};

// All results are [rows, inner] and contiguous. gate and up are null unless the products are kept.
template <typename T>
struct ForwardParams {
  Sizes sizes;
  Activation activation;
  Operand<T> x;            // [rows, hidden]
  Operand<T> gate_weight;  // [inner, hidden]
  Operand<T> up_weight;    // [inner, hidden]
  T* out;
  T* gate;  // x Wg^T
  T* up;    // x Wu^T
};

template <typename T>
cudaError_t launch_tile(const ForwardParams<T>& params, const KernelConfig& config, cudaStream_t stream);
template <typename T>
cudaError_t launch_swap_ab(const ForwardParams<T>& params, const KernelConfig& config, cudaStream_t stream);
// This one does not keep the products.
template <typename T>
cudaError_t launch_stream(const ForwardParams<T>& params, const KernelConfig& config, cudaStream_t stream);

// Parameters of the backward. inner and hidden are multiples of 8, and inner is below 2^30. Pairs are (gate,
// up). The gradients of the products are [rows, inner]; all results are contiguous.
template <typename T>
struct InputGradientParams {
  Sizes sizes;
  Operand<T> dproducts[2];
  Operand<T> weights[2];  // [inner, hidden]
  T* dx;                  // [rows, hidden]
};
template <typename T>
struct WeightGradientParams {
  Sizes sizes;
  Operand<T> dproducts[2];
  Operand<T> x;    // [rows, hidden]
  T* dweights[2];  // [inner, hidden]; one of the two may be null, which is not wanted
};

// dx = dgate gate_weight + dup up_weight
template <typename T>
cudaError_t launch_input_gradient(const InputGradientParams<T>& params, cudaStream_t stream);
// dgate_weight = dgate^T x, dup_weight = dup^T x
template <typename T>
cudaError_t launch_weight_gradients(const WeightGradientParams<T>& params, cudaStream_t stream);

// out = gate * act(up), with gate and up in fp32. All have `count` elements and are contiguous.
template <typename T>
cudaError_t launch_gate(Activation activation, int64_t count, const float* gate, const float* up, T* out,
                        cudaStream_t stream);
// dgate = dy act(up), dup = dy gate act'(up). gate and up are of type P, which is T or float.
template <typename T, typename P>
cudaError_t launch_gate_backward(Activation activation, int64_t count, const T* dy, const P* gate,
                                 const P* up, T* dgate, T* dup, cudaStream_t stream);

}  // namespace htree::gated_mlp
