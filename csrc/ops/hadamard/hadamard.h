// The contract of the hadamard family: sizes, checks and entry points. docs/semantics/hadamard.md §4.1
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <optional>

namespace htree::hadamard {

// y = scale * x * H_n over rows of n = 2^log2_length elements. A row lies in segments of 2^log2_segment
// contiguous elements: one segment for hadamard_transform, one per head of the group for grouped_hadamard.
struct Problem {
  int log2_length;
  int log2_segment;
  double scale;
};

// Where the rows lie: the sizes of three dims of rows, outermost first, and the strides in elements of x and
// y between rows and between the segments of a row.
struct Rows {
  std::array<int64_t, 3> sizes;
  std::array<int64_t, 3> x_strides;
  std::array<int64_t, 3> y_strides;
  int64_t x_segment_stride;
  int64_t y_segment_stride;
};

// The default scale, n^(-1/2), makes the transform its own inverse.
Problem problem_of(const at::Tensor& x, std::optional<double> scale);
Problem grouped_problem_of(const at::Tensor& x, int64_t group, std::optional<double> scale);

// Empty where the rows of a tensor have no unit stride or need more than three dims; then x must be copied.
std::optional<Rows> rows_of(const Problem& problem, const at::Tensor& x, const at::Tensor& y);
// x and y are [B, H, S, D]: rows are (batch, group of heads, position), segments the heads of a group.
std::optional<Rows> grouped_rows_of(const Problem& problem, const at::Tensor& x, const at::Tensor& y);

// Check the arguments of the functional ops and return the output: uninitialised, contiguous, of
// x's shape and dtype.
at::Tensor prepare(const at::Tensor& x, std::optional<double> scale);
at::Tensor prepare_grouped(const at::Tensor& x, int64_t group, std::optional<double> scale);
// Checks the arguments of the in-place op, on metadata alone.
void prepare_inplace(const at::Tensor& x, std::optional<double> scale);

// Write every row of y. y is the same view as x or shares no memory with it; both have at least one element.
void transform_cpu(const Problem& problem, const Rows& rows, const at::Tensor& x, const at::Tensor& y);
void transform_cuda(const Problem& problem, const Rows& rows, const at::Tensor& x, const at::Tensor& y);

}  // namespace htree::hadamard
