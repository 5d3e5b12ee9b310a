// Kernel parameters: raw pointers, strides in elements, sizes. Torch-free.
#pragma once

#include <cstdint>

namespace htree::hadamard {

constexpr int kMaxLog2Length = 15;

// How the kernel reaches the elements of a row.
enum class Access {
  kWhole,     // 16-byte aligned packs of one contiguous row
  kSegments,  // 16-byte aligned packs of several contiguous segments
  kElements,  // single elements: a start or a stride that is not a multiple of 16 bytes
};

// Rows of 2^log2_length elements in three dims of rows, outermost first. Element i of a row lies at (i >>
// log2_segment) * segment_stride + (i mod 2^log2_segment).
template <typename T>
struct RowView {
  T* data;
  int64_t strides[3];
  int64_t segment_stride;
  Access access;
};

template <typename T, typename Scalar>
struct TransformParams {
  RowView<const T> x;
  RowView<T> y;      // the same view as x, or disjoint from it
  int64_t sizes[3];  // sizes of the dims of rows; their product is below 2^31
  int log2_length;
  int log2_segment;
  Scalar scale;
};

}  // namespace htree::hadamard
