// Kernel parameters: raw pointers, strides in elements, sizes. Torch-free.
#pragma once

#include <cstdint>

namespace htree::causal_softmax {

// A [batch, rows, cols] matrix.
template <typename T>
struct Matrix {
  T* data;
  int64_t batch_stride;
  int64_t row_stride;
  int64_t col_stride;
};

// One launch takes fewer than 2^31 rows in all.
struct Shape {
  int64_t batch;
  int64_t rows;
  int64_t cols;
};

template <typename T>
struct ForwardParams {
  Matrix<const T> x;
  Matrix<T> y;
  Shape shape;
};

template <typename T>
struct BackwardParams {
  Matrix<const T> dy;
  Matrix<const T> y;
  Matrix<T> dx;
  Shape shape;
};

}  // namespace htree::causal_softmax
