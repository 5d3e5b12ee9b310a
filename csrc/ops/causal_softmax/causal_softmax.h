// The contract of the causal_softmax family: sizes, checks and
// entry points. docs/semantics/causal_softmax.md §5
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

namespace htree::causal_softmax {

// Row i of a [rows, cols] score matrix sees its first cols - rows + 1 + i columns; the rest of the row is +0.
struct Problem {
  int64_t batch;  // matrices: the product of the leading sizes
  int64_t rows;
  int64_t cols;
  int block_size;  // threads per row on CUDA: 512 or 1024; 0 chooses by cols
};

// Strides in elements. The batch stride leads from each matrix to the next one in the order of the leading dims.
struct Strides {
  int64_t batch;
  int64_t row;
  int64_t col;
};

// The batch stride of x [..., rows, cols], where its leading dims have a common one.
std::optional<int64_t> batch_stride(const at::Tensor& x);
// x, or a contiguous copy where its leading dims have no common stride.
at::Tensor with_batch_stride(const at::Tensor& x);
Problem problem_of(const at::Tensor& x, int64_t block_size);
Strides strides_of(const at::Tensor& x);  // of a tensor that has a batch stride

// Checks the arguments of the functional op and returns the output: uninitialised, contiguous, of
// x's shape and dtype.
at::Tensor prepare(const at::Tensor& x, int64_t block_size);
// Checks those of the out= op: out is the same view as x or shares no memory with it.
void prepare_out(const at::Tensor& x, int64_t block_size, const at::Tensor& out);
// Checks those of the in-place op.
void prepare_inplace(const at::Tensor& x, int64_t block_size);
// Checks those of the backward op and returns dx, uninitialised.
at::Tensor prepare_backward(const at::Tensor& dy, const at::Tensor& y);

// Write every element of the last tensor, which for the forward may be x. All have batch strides.
void forward_cpu(const at::Tensor& x, int64_t block_size, const at::Tensor& out);
void forward_cuda(const at::Tensor& x, int64_t block_size, const at::Tensor& out);
void backward_cpu(const at::Tensor& dy, const at::Tensor& y, const at::Tensor& dx);
void backward_cuda(const at::Tensor& dy, const at::Tensor& y, const at::Tensor& dx);

}  // namespace htree::causal_softmax
