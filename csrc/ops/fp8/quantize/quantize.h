// The contract of quantisation: sizes, checks and entry points. docs/semantics/fp8.md §3.3
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string_view>
#include <tuple>

#include "ops/fp8/quantize/quantize_params.h"

namespace htree::fp8 {

using OptionalTensor = std::optional<at::Tensor>;
using Quantized = std::tuple<at::Tensor, at::Tensor, at::Tensor>;  // codes, scale, number of overflows

// Which elements share a scale. "tensor": all of them. "channel": those along `dim`. "block": groups of
// `block` elements along `dim`, the last of which may be shorter.
struct Grouping {
  std::string_view granularity;
  int64_t dim;
  int64_t block;
};

// A tensor as a matrix with unit column stride: the tensor itself, or a contiguous copy where
// its strides need one.
struct MatrixInput {
  at::Tensor data;
  MatrixShape shape;
  int64_t row_stride;
};
MatrixInput matrix_of(const at::Tensor& x, const Grouping& grouping);

// Check the arguments and return uninitialised outputs. A given scale must have the shape
// that the grouping implies.
at::Tensor prepare_scale(const at::Tensor& x, const Grouping& grouping);
Quantized prepare_quantize(const at::Tensor& x, const OptionalTensor& scale, const Grouping& grouping);
at::Tensor prepare_fake(const at::Tensor& x, const OptionalTensor& scale, const Grouping& grouping);
at::Tensor prepare_fake_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& scale,
                                 const Grouping& grouping);
at::Tensor prepare_dequantize(const at::Tensor& codes, const at::Tensor& scale, at::ScalarType dtype,
                              int64_t block);
// The grouping that follows from the shape of a scale.
Grouping grouping_of(const at::Tensor& codes, const at::Tensor& scale, int64_t block);

// What is written besides the scale. Undefined tensors are not wanted; the others are contiguous and have the
// shape of x.
struct QuantizeOutputs {
  at::Tensor codes;
  at::Tensor values;        // dequantised codes in the dtype of x
  at::Tensor num_overflow;  // int32 []
};

// `scale` is contiguous. It is read where it is `given`, else written. x has at least one element.
void quantize_cpu(const MatrixInput& x, const at::Tensor& scale, bool given, const QuantizeOutputs& out);
void quantize_cuda(const MatrixInput& x, const at::Tensor& scale, bool given, const QuantizeOutputs& out);
void dequantize_cpu(const MatrixInput& codes, const at::Tensor& scale, const at::Tensor& out);
void dequantize_cuda(const MatrixInput& codes, const at::Tensor& scale, const at::Tensor& out);
// dx = dy where |x * scale| <= 448, else 0; dy and dx are contiguous.
void fake_backward_cpu(const at::Tensor& dy, const MatrixInput& x, const at::Tensor& scale,
                       const at::Tensor& dx);
void fake_backward_cuda(const at::Tensor& dy, const MatrixInput& x, const at::Tensor& scale,
                        const at::Tensor& dx);

}  // namespace htree::fp8
