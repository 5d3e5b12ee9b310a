// The contract of the causal_softmax room: sizes, checks and
// entry points. docs/semantics/causal_softmax.md §5
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace htree::causal_softmax {

// Row i of a [rows, cols] score matrix sees its first cols - rows + 1 + i columns; the rest of the row is +0.
struct Problem {
  int64_t batch;
  int64_t rows;
  int64_t cols;
  int block_size;  // threads per row on CUDA: 512 or 1024; 0 chooses by cols
};

// Strides in elements of a 2-D or 3-D operand; the batch stride of a 2-D operand is 0.
struct Strides {
  int64_t batch;
  int64_t row;
  int64_t col;
};

Problem problem_of(const at::Tensor& x, int64_t block_size);
Strides strides_of(const at::Tensor& x);

// Checks the arguments of the functional op and returns the output: uninitialised, contiguous, of
// x's shape and dtype.
at::Tensor prepare(const at::Tensor& x, int64_t block_size);
// Checks those of the out= op: out is the same view as x or shares no memory with it.
void prepare_out(const at::Tensor& x, int64_t block_size, const at::Tensor& out);
// Checks those of the in-place op.
void prepare_inplace(const at::Tensor& x, int64_t block_size);
// Checks those of the backward op and returns dx, uninitialised.
at::Tensor prepare_backward(const at::Tensor& dy, const at::Tensor& y);

// Write every element of `out` [batch, rows, cols].
void forward_cpu(const at::Tensor& x, int64_t block_size, const at::Tensor& out);
void forward_cuda(const at::Tensor& x, int64_t block_size, const at::Tensor& out);
void backward_cpu(const at::Tensor& dy, const at::Tensor& y, const at::Tensor& dx);
void backward_cuda(const at::Tensor& dy, const at::Tensor& y, const at::Tensor& dx);

}  // namespace htree::causal_softmax
