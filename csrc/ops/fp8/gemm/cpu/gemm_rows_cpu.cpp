// The CPU kernel of fp8_gemm: the values of codes in fp32, sums of short chains of their products in fp64,
// and scales that are applied to a tile of sums while it is in the cache.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "device/sizes.h"
#include "host/cpu/isa.h"
#include "host/cpu/storage.h"
#include "host/dispatch.h"
#include "ops/fp8/gemm/cpu/gemm_rows.h"
#include "ops/fp8/gemm/gemm.h"
#include "ops/fp8/scale_values.h"

namespace htree::fp8 {
namespace {

using at::Tensor;

constexpr int64_t kTileRows = 64;
constexpr int64_t kTileColumns = 48;  // a multiple of 16 and of every kernel's columns
constexpr int64_t kFewRows = 4;  // with up to so many rows codes of b are decoded where they are multiplied
constexpr int64_t kCopyBytes = 1 << 26;      // bytes of the values of a or b at a time
constexpr int64_t kWidenGrain = 1 << 15;     // codes of a task
constexpr int64_t kMultiplyGrain = 1 << 18;  // multiply-adds of a task

const GemmKernels& kernels() {
  return HTREE_PICK_ISA(kGemmKernels);
}

// Codes in rows in which they are adjacent.
struct CodeRows {
  Tensor codes;  // [rows, depth], of one byte each
  int64_t size() const { return codes.size(0); }
  int64_t depth() const { return codes.size(1); }
  int64_t stride() const { return codes.stride(0); }
  const uint8_t* data() const { return codes.const_data_ptr<uint8_t>(); }
};

constexpr int64_t kSquare = 64;

// to[r][k] = from[k][r] for r < rows and k < depth, both at most kSquare. It goes by way of a copy whose rows
// do not lie a power of two apart, as those of `from` may.
void transpose_square(const uint8_t* from, int64_t from_pitch, int64_t rows, int64_t depth, uint8_t* to,
                      int64_t to_pitch) {
  uint8_t square[kSquare][kSquare];
  for (int64_t k = 0; k < depth; ++k) {
    std::memcpy(square[k], from + k * from_pitch, static_cast<size_t>(rows));
  }
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t k = 0; k < depth; ++k) {
      to[r * to_pitch + k] = square[k][r];
    }
  }
}

// Rows of adjacent codes, out of columns of adjacent codes.
Tensor transposed(const Tensor& codes) {
  const int64_t rows = codes.size(0);
  const int64_t depth = codes.size(1);
  Tensor result = at::empty({rows, depth}, codes.options().memory_format(at::MemoryFormat::Contiguous));
  const auto* from = codes.const_data_ptr<uint8_t>();
  auto* to = result.mutable_data_ptr<uint8_t>();
  const int64_t grain = std::max<int64_t>(1, kWidenGrain / (kSquare * depth));
  at::parallel_for(0, ceil_div(rows, kSquare), grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin * kSquare; row < std::min(end * kSquare, rows); row += kSquare) {
      for (int64_t k = 0; k < depth; k += kSquare) {
        transpose_square(from + k * codes.stride(1) + row, codes.stride(1), std::min(kSquare, rows - row),
                         std::min(kSquare, depth - k), to + row * depth + k, depth);
      }
    }
  });
  return result;
}

CodeRows rows_of(const Tensor& matrix) {
  const Tensor codes = matrix.view(at::kByte);
  const auto has_stride = [&](int64_t dim) { return codes.stride(dim) == 1 || codes.size(dim) == 1; };
  return {has_stride(1) ? codes : has_stride(0) ? transposed(codes) : codes.contiguous()};
}

// Padded rows of fp32 values, as many as kCopyBytes hold.
class Values {
 public:
  Values(int64_t depth, int64_t rows)
      : stride(padded_stride(depth)),
        most_rows(std::min(rows, std::max(kTileRows, kCopyBytes / (4 * stride) / kTileRows * kTileRows))),
        memory_(at::empty({most_rows * stride}, at::TensorOptions(at::kFloat))) {}

  void fill(const CodeRows& from, int64_t first, int64_t count) {
    const auto widen = kernels().widen;
    const int64_t grain = std::max<int64_t>(1, kWidenGrain / from.depth());
    at::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        widen(from.data() + (first + row) * from.stride(), from.depth(), data() + row * stride, stride);
      }
    });
  }
  float* data() const { return memory_.mutable_data_ptr<float>(); }

  const int64_t stride;
  const int64_t most_rows;

 private:
  Tensor memory_;
};

struct ScaleOf {
  const float* data;
  int64_t stride;  // 0 where one scale serves all
  ScaleOf(const Tensor& scale, int64_t dim)
      : data(scale.const_data_ptr<float>()), stride(scale.dim() == 0 ? 0 : scale.stride(dim)) {}
  double at(int64_t i) const { return data[i * stride]; }
};

// Rows of `a` from `first_row` on and of b from `first_column` on. W is the type of b's values or codes.
template <typename W>
struct Block {
  const float* a;
  int64_t a_stride;
  int64_t first_row;
  int64_t rows;
  const W* b;
  int64_t b_stride;
  int64_t first_column;
  int64_t columns;
  int64_t depth;
};

template <typename W>
void multiply(const RowProducts<float, W, double>& products) {
  if constexpr (std::is_same_v<W, float>) {
    kernels().multiply_values(products);
  } else {
    kernels().multiply_codes(products);
  }
}

template <typename T, typename W>
void multiply_block(const Block<W>& block, const GemmArguments& g, const Tensor& c) {
  const ScaleOf a_scale(g.a_scale, 0);
  const ScaleOf b_scale(g.b_scale, 1);
  auto* out = reinterpret_cast<Storage<T>*>(c.mutable_data_ptr<T>());
  const int64_t column_tiles = ceil_div(block.columns, kTileColumns);
  const int64_t work = std::min(block.rows, kTileRows) * kTileColumns * block.depth;
  const auto run_tile = [&](int64_t tile) {
    const int64_t row = tile / column_tiles * kTileRows;
    const int64_t column = tile % column_tiles * kTileColumns;
    const int64_t rows = std::min(kTileRows, block.rows - row);
    const int64_t columns = std::min(kTileColumns, block.columns - column);
    alignas(64) double sums[kTileRows * kTileColumns];
    alignas(64) double scales[kTileColumns];
    for (int64_t i = 0; i < kTileColumns; ++i) {
      scales[i] = b_scale.at(block.first_column + column + std::min(i, columns - 1));
    }
    if (columns < kTileColumns) {
      std::fill(sums, sums + rows * kTileColumns, 0.0);
    }
    multiply<W>({block.a + row * block.a_stride, block.a_stride, rows, block.b + column * block.b_stride,
                 block.b_stride, columns, block.depth, sums, kTileColumns});
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t at_row = block.first_row + row + r;
      loops_of<T>(kernels())(sums + r * kTileColumns, columns, a_scale.at(at_row), scales,
                             out + at_row * c.size(1) + block.first_column + column);
    }
  };
  const int64_t num_tiles = ceil_div(block.rows, kTileRows) * column_tiles;
  at::parallel_for(0, num_tiles, std::max<int64_t>(1, kMultiplyGrain / work),
                   [&](int64_t begin, int64_t end) {
                     for (int64_t tile = begin; tile < end; ++tile) {
                       run_tile(tile);
                     }
                   });
}

template <typename T>
void multiply_all(const GemmArguments& g, const Tensor& c) {
  const CodeRows a = rows_of(g.a);
  const CodeRows b = rows_of(g.b.t());
  const int64_t depth = a.depth();
  Values a_values(depth, a.size());
  if (a.size() <= kFewRows) {
    a_values.fill(a, 0, a.size());
    multiply_block<T, uint8_t>(
        {a_values.data(), a_values.stride, 0, a.size(), b.data(), b.stride(), 0, b.size(), depth}, g, c);
    return;
  }
  Values b_values(depth, b.size());
  for (int64_t row = 0; row < a.size(); row += a_values.most_rows) {
    const int64_t rows = std::min(a_values.most_rows, a.size() - row);
    a_values.fill(a, row, rows);
    for (int64_t column = 0; column < b.size(); column += b_values.most_rows) {
      const int64_t columns = std::min(b_values.most_rows, b.size() - column);
      b_values.fill(b, column, columns);
      multiply_block<T, float>({a_values.data(), a_values.stride, row, rows, b_values.data(), b_values.stride,
                                column, columns, depth},
                               g, c);
    }
  }
}

}  // namespace

void gemm_cpu(const GemmArguments& g, at::IntArrayRef /*config*/, const Tensor& c) {
  if (active_isa() == Isa::kBaseline && g.a.size(0) > kFewRows) {
    exact_gemm_cpu(g, c);  // the BLAS library's kernels may use a higher instruction set than ours
    return;
  }
  check_scale_values(g.op, "a_scale", g.a_scale);
  check_scale_values(g.op, "b_scale", g.b_scale);
  dispatch_dtype(g.op, c.scalar_type(), FloatTypes{},
                 [&](auto tag) { multiply_all<typename decltype(tag)::type>(g, c); });
}

}  // namespace htree::fp8
