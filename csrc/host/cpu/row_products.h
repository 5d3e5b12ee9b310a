// The arguments of the CPU's dot products of rows (host/cpu/simd_products.h).
#pragma once

#include <cstdint>

namespace htree {

// sums[r][c] = sum over k of x[r][k] w[c][k], for r < rows and c < columns; strides in elements.
template <typename X, typename W, typename S>
struct RowProducts {
  const X* x;  // [rows, depth], then zeros up to a multiple of kRowPadding
  int64_t x_stride;
  int64_t rows;
  const W* w;  // [columns, depth]
  int64_t w_stride;
  int64_t columns;
  int64_t depth;
  S* sums;  // [rows, columns]
  int64_t sums_stride;
};

constexpr int64_t kRowPadding = 32;  // elements in the widest step of any instruction set

// The stride of padded copies of rows. It is kRowPadding more than the padding needs, because rows a power of
// two apart would contend for the same few lines of the cache.
constexpr int64_t padded_stride(int64_t depth) {
  return (depth + kRowPadding - 1) / kRowPadding * kRowPadding + kRowPadding;
}

}  // namespace htree
