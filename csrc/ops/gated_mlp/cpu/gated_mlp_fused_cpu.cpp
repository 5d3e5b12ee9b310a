// The forward in one pass over tiles of the result: both products of a tile, then its elementwise part,
// while the sums are in the cache. Weights are read in their own dtype. x, which every column meets
// again, is widened once.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>

#include "device/sizes.h"
#include "host/dispatch.h"
#include "ops/gated_mlp/cpu/gated_mlp_cpu.h"

namespace htree::gated_mlp {
namespace {

using at::Tensor;

constexpr int64_t kTileRows = 64;
constexpr int64_t kTileColumns = 48;  // a multiple of every kernel's columns
constexpr int64_t kWideColumns = 12;  // columns of weights that are widened at a time: they stay in the cache
constexpr int64_t kLeastWideRows = 16;   // with so many rows widening once is faster than for every four rows
constexpr int64_t kFewRows = 4;          // with up to so many rows a product waits for the weights
constexpr int64_t kMostFloatRows = 128;  // with more rows the BLAS library's product of fp32 is faster
constexpr int64_t kCopyBytes = 1 << 26;  // bytes of the copy of x
constexpr int64_t kWidenGrain = 1 << 15;     // elements of a task
constexpr int64_t kMultiplyGrain = 1 << 18;  // multiply-adds of a task

// Whether elements of the last dim are adjacent, or there is only one.
bool has_rows(const Tensor& matrix) {
  return matrix.stride(1) == 1 || matrix.size(1) == 1;
}

// T is the dtype of the operands, X that of the padded copy of x.
template <typename T, typename X>
class Forward {
 public:
  using Multiply = void (*)(const RowProducts<X, Storage<T>, float>&);
  using Pad = void (*)(const Storage<T>* from, int64_t count, X* to, int64_t width);

  Forward(const Operands& o, const Results& results, Multiply multiply, Pad pad)
      : o_(o), results_(results), multiply_(multiply), pad_(pad), x_(has_rows(o.x) ? o.x : o.x.contiguous()) {
    const int64_t fitting = kCopyBytes / (static_cast<int64_t>(sizeof(X)) * stride_) / kTileRows * kTileRows;
    most_rows_ = std::min(o.sizes.rows, std::max(fitting, kTileRows));
    padded_ = at::empty({most_rows_ * stride_}, at::TensorOptions(c10::CppTypeToScalarType<Element>::value));
  }

  void run() {
    for (int64_t first = 0; first < o_.sizes.rows; first += most_rows_) {
      run_rows(first, std::min(most_rows_, o_.sizes.rows - first));
    }
  }

 private:
  // Whether weights of a half type meet an x of fp32.
  static constexpr bool kWidens = std::is_same_v<X, float> && !std::is_same_v<T, float>;
  using Element = std::conditional_t<std::is_same_v<X, float>, float, c10::BFloat16>;

  X* padded() const { return reinterpret_cast<X*>(padded_.template mutable_data_ptr<Element>()); }

  void run_rows(int64_t first_row, int64_t rows) {
    const auto* from = reinterpret_cast<const Storage<T>*>(x_.template const_data_ptr<T>());
    const int64_t grain = std::max<int64_t>(1, kWidenGrain / o_.sizes.hidden);
    at::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        pad_(from + (first_row + row) * x_.stride(0), o_.sizes.hidden, padded() + row * stride_, stride_);
      }
    });
    const int64_t columns = o_.sizes.inner;
    const int64_t row_tiles = ceil_div(rows, kTileRows);
    const int64_t column_tiles = ceil_div(columns, kTileColumns);
    const int64_t work = 2 * std::min(rows, kTileRows) * kTileColumns * o_.sizes.hidden;
    at::parallel_for(0, row_tiles * column_tiles, std::max<int64_t>(1, kMultiplyGrain / work),
                     [&](int64_t begin, int64_t end) {
                       const Tensor wide = at::empty(
                           {kWidens && rows >= kLeastWideRows ? kWideColumns * stride_ : 0}, at::kFloat);
                       for (int64_t tile = begin; tile < end; ++tile) {
                         const int64_t row = tile / column_tiles * kTileRows;
                         const int64_t column = tile % column_tiles * kTileColumns;
                         run_tile(first_row, row, std::min(kTileRows, rows - row), column,
                                  std::min(kTileColumns, columns - column), wide);
                       }
                     });
  }

  // The products of one tile with `columns` rows of a weight.
  void multiply(int64_t row, int64_t rows, const Tensor& weight, int64_t column, int64_t columns,
                const Tensor& wide, float* sums) {
    const auto* w =
        reinterpret_cast<const Storage<T>*>(weight.const_data_ptr<T>()) + column * weight.stride(0);
    const X* x = padded() + row * stride_;
    if constexpr (kWidens) {
      if (rows >= kLeastWideRows) {
        float* const copy = wide.mutable_data_ptr<float>();
        for (int64_t first = 0; first < columns; first += kWideColumns) {
          const int64_t count = std::min(kWideColumns, columns - first);
          for (int64_t c = 0; c < count; ++c) {
            pad_(w + (first + c) * weight.stride(0), o_.sizes.hidden, copy + c * stride_, stride_);
          }
          loops_of<float>(product_kernels())
              .multiply(
                  {x, stride_, rows, copy, stride_, count, o_.sizes.hidden, sums + first, kTileColumns});
        }
        return;
      }
    }
    multiply_({x, stride_, rows, w, weight.stride(0), columns, o_.sizes.hidden, sums, kTileColumns});
  }

  // Computes one tile; `row` counts from first_row on.
  void run_tile(int64_t first_row, int64_t row, int64_t rows, int64_t column, int64_t columns,
                const Tensor& wide) {
    alignas(64) float linear[kTileRows * kTileColumns];
    alignas(64) float acted[kTileRows * kTileColumns];
    multiply(row, rows, o_.linear, column, columns, wide, linear);
    multiply(row, rows, o_.acted, column, columns, wide, acted);
    const auto gate = loops_of<T>(row_kernels()).forward;
    const auto round = loops_of<T>(product_kernels()).round;
    for (int64_t r = 0; r < rows; ++r) {
      const float* linear_row = linear + r * kTileColumns;
      const float* acted_row = acted + r * kTileColumns;
      const int64_t at = (first_row + row + r) * o_.sizes.inner + column;
      gate(o_.activation, columns, linear_row, acted_row, data_of(results_.out) + at);
      if (results_.linear.defined()) {
        round(linear_row, data_of(results_.linear) + at, columns);
        round(acted_row, data_of(results_.acted) + at, columns);
      }
    }
  }

  static Storage<T>* data_of(const Tensor& t) {
    return reinterpret_cast<Storage<T>*>(t.mutable_data_ptr<T>());
  }

  const Operands& o_;
  const Results& results_;
  Multiply multiply_;
  Pad pad_;
  Tensor x_;
  int64_t stride_ = padded_stride(o_.sizes.hidden);
  int64_t most_rows_;
  Tensor padded_;  // [most_rows, stride]
};

[[maybe_unused]] void pad_bf16(const Bf16* from, int64_t count, Bf16* to, int64_t width) {
  std::memcpy(to, from, sizeof(Bf16) * static_cast<size_t>(count));
  std::memset(to + count, 0, sizeof(Bf16) * static_cast<size_t>(width - count));
}

}  // namespace

bool is_fused(const Operands& o) {
  const auto dtype = o.x.scalar_type();
  if (dtype == at::kDouble || !has_rows(o.linear) || !has_rows(o.acted)) {
    return false;
  }
  return o.sizes.rows <= (active_isa() == Isa::kBaseline ? kFewRows
                          : dtype == at::kFloat          ? kMostFloatRows
                                                         : o.sizes.rows);
}

void fused_forward_cpu(const Operands& o, const Results& results) {
#if defined(__x86_64__)
  if (o.x.scalar_type() == at::kBFloat16 && active_isa() == Isa::kAvx512Bf16 && o.sizes.rows > kFewRows) {
    Forward<c10::BFloat16, Bf16>(o, results, multiply_bf16_pairs, pad_bf16).run();
    return;
  }
#endif
  dispatch_dtype("gated_mlp", o.x.scalar_type(), FloatTypes{}, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto products = loops_of<T>(product_kernels());
    Forward<T, float>(o, results, products.multiply, products.widen).run();
  });
}

}  // namespace htree::gated_mlp
