// The contract of fp8_gemm: sizes, checks and entry points. docs/semantics/fp8.md §3.3
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/OptionalArrayRef.h>

#include <cstdint>

#include "ops/fp8/gemm/gemm_params.h"

namespace htree::fp8 {

// The arguments as they come: a [M, K] and b [K, N] e4m3 of any strides, scales fp32 [] or [M, 1] and [1, N].
struct GemmArguments {
  const char* op;  // the name in messages
  const at::Tensor& a;
  const at::Tensor& b;
  const at::Tensor& a_scale;
  const at::Tensor& b_scale;
  at::ScalarType output_dtype;
};

// Checks the arguments of fp8_gemm or fp8_gemm_exact and returns c [M, N], uninitialised, contiguous.
at::Tensor prepare_gemm(const GemmArguments& arguments, at::OptionalIntArrayRef config);

// Write every element of c. M, N and K are at least 1. `config` is empty or a tuple of the tuning space.
void gemm_cpu(const GemmArguments& arguments, at::IntArrayRef config, const at::Tensor& c);
void gemm_cuda(const GemmArguments& arguments, at::IntArrayRef config, const at::Tensor& c);
// The same with sums in fp64, see gemm_exact.h.
void exact_gemm_cpu(const GemmArguments& arguments, const at::Tensor& c);
void exact_gemm_cuda(const GemmArguments& arguments, const at::Tensor& c);

}  // namespace htree::fp8
