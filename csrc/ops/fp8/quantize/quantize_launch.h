// Torch-free launchers of quantisation, one set per storage type; csrc/instances.py lists them.
#pragma once

#include <cuda_runtime_api.h>

#include "ops/fp8/quantize/quantize_config.h"

namespace htree::fp8 {

// Outputs that are null are not wanted; at most one of codes and values is.
template <typename T>
struct QuantizeArgs {
  const T* x;
  int64_t row_stride;
  MatrixShape shape;
  int pack;  // choose_pack()
  float* scale;
  bool is_scale_given;
  uint8_t* codes;
  T* values;
  int* num_overflow;  // written, where codes are
  uint32_t* partial;  // choose_largest_config().num_partials numbers
  int num_processors;
  int most_pdl_blocks;  // of a launch with LaunchShape::pdl
};

// x is a matrix of codes for dequantisation, of T for the gradient.
template <typename In, typename T>
struct ApplyArgs {
  const In* x;
  const T* dy;  // for the gradient alone; contiguous
  T* out;       // contiguous
  const float* scale;
  int64_t row_stride;
  MatrixShape shape;
  int pack;
  int num_processors;
  int most_pdl_blocks;  // of a launch with LaunchShape::pdl
};

// Launch on `stream`; the errors are those of the runtime.
template <typename T>
cudaError_t launch_quantize(const QuantizeArgs<T>& args, cudaStream_t stream);
template <typename T>
cudaError_t launch_dequantize(const ApplyArgs<uint8_t, T>& args, cudaStream_t stream);
template <typename T>
cudaError_t launch_fake_backward(const ApplyArgs<T, T>& args, cudaStream_t stream);

}  // namespace htree::fp8
