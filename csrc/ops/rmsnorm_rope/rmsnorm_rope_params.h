// Kernel parameters: raw pointers, strides in elements, sizes. Torch-free.
#pragma once

#include <cstdint>
#include <type_traits>

namespace htree::rmsnorm_rope {

template <typename T>
using ArithmeticOf = std::conditional_t<std::is_same_v<T, double>, double, float>;

// Weight and tables may have another floating dtype than x. It is looked up where they are loaded.
enum class Dtype : int { kFloat, kHalf, kBFloat16, kDouble };

// [width], unit stride.
struct Weight {
  const void* data;
  Dtype dtype;
};

// [batch, positions, head_dim] or, when `upper` is 0, [batch, positions, head_dim / 2]: the factors of the
// upper half of a head start `upper` columns into the row. A batch stride of 0: all sequences share the table.
struct Table {
  const void* data;
  int64_t batch_stride;
  int64_t position_stride;
  int upper;
  Dtype dtype;
};

// [batch, positions, heads, width], unit stride in the last dim.
template <typename T>
struct Rows {
  T* data;
  int64_t batch_stride;
  int64_t position_stride;
  int64_t head_stride;
};

// A row is what one mean runs over: `width` elements, in width / head_dim heads that are rotated one by one.
// A launch has fewer than 2^31 rows (batch * positions * heads).
struct Shape {
  int64_t batch;
  int64_t positions;
  int64_t heads;
  int width;
  int head_dim;
  bool batched_tables;  // rows of one position share a row of the tables only within their sequence
  double eps;
};

template <typename T>
struct ForwardParams {
  Rows<const T> x;
  Rows<T> y;
  Weight weight;
  Table cos;
  Table sin;
  Shape shape;
};

template <typename T>
struct BackwardParams {
  Rows<const T> dy;
  Rows<const T> x;
  Rows<T> dx;                  // data null: not wanted
  ArithmeticOf<T>* dw_blocks;  // [blocks, width], one row per block of the launch; null: not wanted
  Weight weight;
  Table cos;
  Table sin;
  Shape shape;
};

// out[j] = sum over the blocks of dw_blocks[block, j].
template <typename A>
struct SumParams {
  const A* dw_blocks;
  void* out;
  Dtype out_dtype;
  int num_blocks;
  int width;
};

}  // namespace htree::rmsnorm_rope
