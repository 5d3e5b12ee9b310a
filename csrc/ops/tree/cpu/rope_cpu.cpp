// CPU kernel of rope (docs/semantics/tree_attention.md §1.4), parallel over rows.
#include "host/dispatch.h"
#include "ops/tree/cpu/stage_cpu.h"
#include "ops/tree/tree_kernels.h"

namespace htree::tree_attention {
namespace {

// All positions are checked before any row is rotated: the row kernels do not know the size of the table.
template <typename Index>
void check_positions(const Tensor& positions, int64_t size) {
  const auto* values = positions.const_data_ptr<Index>();
  const int64_t rows = positions.dim() == 2 ? positions.size(0) : 1;
  const int64_t row_stride = positions.dim() == 2 ? positions.stride(0) : 0;
  const int64_t columns = positions.size(-1);
  for (int64_t b = 0; b < rows; ++b) {
    for (int64_t t = 0; t < columns; ++t) {
      const int64_t position = values[b * row_stride + t * positions.stride(-1)];
      TORCH_CHECK_INDEX(position >= 0 && position < size, "rope: positions must lie in [0, ", size,
                        "), the rows of cos and sin, got ", position);
    }
  }
}

template <typename T, typename Index>
void rotate(const Tensor& x, const Tensor& cos, const Tensor& sin, const Tensor& positions, bool inverse,
            const Tensor& out) {
  using Real = typename Stage<T>::Real;
  check_positions<Index>(positions, cos.size(0));
  const auto* in = stored<T>(x);
  auto* result = stored_mutable<T>(out);
  const Real* cos_data = cos.const_data_ptr<Real>();
  const Real* sin_data = sin.const_data_ptr<Real>();
  const Index* position = positions.const_data_ptr<Index>();
  const int64_t batch_stride = positions.dim() == 2 ? positions.stride(0) : 0;
  const int64_t column_stride = positions.stride(-1);
  const int64_t heads = x.size(2);
  const int64_t width = x.size(3);
  const RowStrides strides = row_strides(x);
  const auto rotate_row = Stage<T>::rows().rotate;
  for_rows(x.size(0), x.size(1), heads, width, [&] {
    return [&](int64_t b, int64_t t, int64_t h) {
      const int64_t angle = position[b * batch_stride + t * column_stride];
      rotate_row(in + strides.at(b, t, h), cos_data + angle * cos.stride(0), sin_data + angle * sin.stride(0),
                 inverse, width / 2, result + ((b * x.size(1) + t) * heads + h) * width);
    };
  });
}

}  // namespace

void rope_cpu(const Tensor& x, const Tensor& cos, const Tensor& sin, const Tensor& positions, bool inverse,
              const Tensor& out) {
  dispatch_dtype("rope", x.scalar_type(), AllFloatTypes{}, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (positions.scalar_type() == at::kInt) {
      rotate<T, int32_t>(x, cos, sin, positions, inverse, out);
    } else {
      rotate<T, int64_t>(x, cos, sin, positions, inverse, out);
    }
  });
}

}  // namespace htree::tree_attention
