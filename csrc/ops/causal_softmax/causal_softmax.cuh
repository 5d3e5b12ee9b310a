// Kernels of causal_softmax. Each row is read once into registers, reduced, and written once; rows too long
// for that go through the looping kernel. Only visible elements are ever read. docs/semantics.md §5.
#pragma once

#include <cstdint>

#include "device/numeric.cuh"
#include "device/pack.cuh"
#include "device/reduce.cuh"
#include "ops/causal_softmax/causal_softmax_params.h"

namespace htree::causal_softmax {

using device::Acc;
using device::Pack;

// kThreads per row, each holding kElems elements (0: the looping kernels). kVectorised rows have unit stride
// and 16-byte aligned starts; the others go element by element at any column stride.
template <typename Element, int kThreads_, int kRowsPerBlock_, int kElems, bool kVectorised>
struct Traits {
  using T = Element;
  static constexpr int kThreads = kThreads_;
  static constexpr int kRowsPerBlock = kRowsPerBlock_;
  static constexpr int kPackElems = kVectorised ? device::kPackOf<T> : 1;
  static constexpr int kPacks = kElems / kPackElems;
  static constexpr bool kStrided = !kVectorised;
  static constexpr int kBlock = kThreads * kRowsPerBlock;
  static_assert(kThreads % device::kWarpSize == 0 && kBlock <= 1024);
  static_assert(kRowsPerBlock == 1 || kThreads == device::kWarpSize, "rows share a block only one warp each");
  static_assert(kElems % kPackElems == 0, "whole packs only");
};

template <typename T>
struct Row {
  T* data;
  int64_t col_stride;
};

template <typename T>
__device__ __forceinline__ Row<T> row_of(const Matrix<T>& m, const Shape& shape, int64_t row_idx) {
  const int64_t batch = row_idx / shape.rows;
  const int64_t row = row_idx - batch * shape.rows;
  return {m.data + batch * m.batch_stride + row * m.row_stride, m.col_stride};
}

// Visible columns of a row: a prefix of at least one.
__device__ __forceinline__ int64_t visible_of(const Shape& shape, int64_t row_idx) {
  return shape.cols - shape.rows + 1 + row_idx % shape.rows;
}

// Elements [col, col + kPackElems) of a row, `fill` from `visible` on. A pack that crosses the boundary is
// read element by element: what lies behind may be NaN and is never touched.
template <typename Tr>
__device__ __forceinline__ void load_visible(const Row<const typename Tr::T>& row, int64_t col,
                                             int64_t visible, typename Tr::T fill,
                                             Pack<typename Tr::T, Tr::kPackElems>& out) {
  if (!Tr::kStrided && col + Tr::kPackElems <= visible) {
    out = device::load_pack<Tr::kPackElems>(row.data + col);
    return;
  }
#pragma unroll
  for (int i = 0; i < Tr::kPackElems; ++i) {
    const int64_t offset = Tr::kStrided ? (col + i) * row.col_stride : col + i;
    out[i] = col + i < visible ? row.data[offset] : fill;
  }
}

template <typename Tr>
__device__ __forceinline__ void store_row_pack(const Row<typename Tr::T>& row, int64_t col, int64_t cols,
                                               const Pack<typename Tr::T, Tr::kPackElems>& value) {
  if (!Tr::kStrided && col + Tr::kPackElems <= cols) {
    device::store_pack_streaming(row.data + col, value);
    return;
  }
#pragma unroll
  for (int i = 0; i < Tr::kPackElems; ++i) {
    if (col + i < cols) {
      row.data[Tr::kStrided ? (col + i) * row.col_stride : col + i] = value[i];
    }
  }
}

// A reduction over the threads of one row: a warp, or the whole block.
template <typename Tr, typename Op, typename A>
__device__ __forceinline__ A row_reduce(A value, A* scratch) {
  if constexpr (Tr::kThreads == device::kWarpSize) {
    return device::warp_reduce<Op>(value);
  } else {
    return device::block_reduce<Tr::kThreads, Op>(value, scratch);
  }
}

template <typename Tr>
__device__ __forceinline__ int64_t first_row() {
  return static_cast<int64_t>(blockIdx.x) * Tr::kRowsPerBlock + threadIdx.x / Tr::kThreads;
}

template <typename Tr>
__device__ __forceinline__ int64_t pack_col(int pack) {
  return (static_cast<int64_t>(pack) * Tr::kThreads + threadIdx.x % Tr::kThreads) * Tr::kPackElems;
}

template <typename Tr>
__global__ void __launch_bounds__(Tr::kBlock)
    forward_kernel(const __grid_constant__ ForwardParams<typename Tr::T> p) {
  using T = typename Tr::T;
  using A = Acc<T>;
  __shared__ A scratch[2][Tr::kThreads / device::kWarpSize];
  const int64_t row_idx = first_row<Tr>();
  if (row_idx >= p.shape.num_rows) {
    return;  // whole warps only: kRowsPerBlock > 1 implies one warp per row
  }
  const auto x = row_of(p.x, p.shape, row_idx);
  const auto y = row_of(p.y, p.shape, row_idx);
  const int64_t visible = visible_of(p.shape, row_idx);

  A value[Tr::kPacks][Tr::kPackElems];
  A best = device::negative_infinity<A>();
#pragma unroll
  for (int pack = 0; pack < Tr::kPacks; ++pack) {
    Pack<T, Tr::kPackElems> in;
    load_visible<Tr>(x, pack_col<Tr>(pack), visible, device::from_acc<T>(device::negative_infinity<A>()), in);
#pragma unroll
    for (int i = 0; i < Tr::kPackElems; ++i) {
      value[pack][i] = device::to_acc(in[i]);
      best = device::Max{}(value[pack][i], best);
    }
  }
  best = row_reduce<Tr, device::Max>(best, scratch[0]);

  // A NaN passes the maximum by and turns the sum, hence the row, into NaN; so do +Inf and a row of -Inf.
  A sum = 0;
#pragma unroll
  for (int pack = 0; pack < Tr::kPacks; ++pack) {
#pragma unroll
    for (int i = 0; i < Tr::kPackElems; ++i) {
      const bool seen = pack_col<Tr>(pack) + i < visible;
      value[pack][i] = seen ? device::exp_for<T>(value[pack][i] - best) : A(0);
      sum += value[pack][i];
    }
  }
  sum = row_reduce<Tr, device::Sum>(sum, scratch[1]);

  const A scale = A(1) / sum;
#pragma unroll
  for (int pack = 0; pack < Tr::kPacks; ++pack) {
    Pack<T, Tr::kPackElems> out;
#pragma unroll
    for (int i = 0; i < Tr::kPackElems; ++i) {
      const bool seen = pack_col<Tr>(pack) + i < visible;
      out[i] = device::from_acc<T>(seen ? value[pack][i] * scale : A(0));
    }
    store_row_pack<Tr>(y, pack_col<Tr>(pack), p.shape.cols, out);
  }
}

// dx = y (dy - sum dy y) on the visible prefix, 0 behind it.
template <typename Tr>
__global__ void __launch_bounds__(Tr::kBlock)
    backward_kernel(const __grid_constant__ BackwardParams<typename Tr::T> p) {
  using T = typename Tr::T;
  using A = Acc<T>;
  __shared__ A scratch[Tr::kThreads / device::kWarpSize];
  const int64_t row_idx = first_row<Tr>();
  if (row_idx >= p.shape.num_rows) {
    return;
  }
  const auto dy_row = row_of(p.dy, p.shape, row_idx);
  const auto y_row = row_of(p.y, p.shape, row_idx);
  const auto dx_row = row_of(p.dx, p.shape, row_idx);
  const int64_t visible = visible_of(p.shape, row_idx);

  // Packs stay in their storage type: two operands of 32 elements would not fit as floats.
  Pack<T, Tr::kPackElems> dy[Tr::kPacks];
  Pack<T, Tr::kPackElems> y[Tr::kPacks];
  const T zero = device::from_acc<T>(A(0));
#pragma unroll
  for (int pack = 0; pack < Tr::kPacks; ++pack) {
    load_visible<Tr>(dy_row, pack_col<Tr>(pack), visible, zero, dy[pack]);
    load_visible<Tr>(y_row, pack_col<Tr>(pack), visible, zero, y[pack]);
  }
  A dot = 0;
#pragma unroll
  for (int pack = 0; pack < Tr::kPacks; ++pack) {
#pragma unroll
    for (int i = 0; i < Tr::kPackElems; ++i) {
      dot += device::to_acc(dy[pack][i]) * device::to_acc(y[pack][i]);
    }
  }
  dot = row_reduce<Tr, device::Sum>(dot, scratch);
#pragma unroll
  for (int pack = 0; pack < Tr::kPacks; ++pack) {
    Pack<T, Tr::kPackElems> out;
#pragma unroll
    for (int i = 0; i < Tr::kPackElems; ++i) {
      const bool seen = pack_col<Tr>(pack) + i < visible;
      const A gradient = device::to_acc(y[pack][i]) * (device::to_acc(dy[pack][i]) - dot);
      out[i] = device::from_acc<T>(seen ? gradient : A(0));
    }
    store_row_pack<Tr>(dx_row, pack_col<Tr>(pack), p.shape.cols, out);
  }
}

// Rows of any length: one pass for maximum and sum (re-based whenever the maximum grows), one that writes. y
// may be x: a thread writes only what it alone reads.
template <typename Tr>
__global__ void __launch_bounds__(Tr::kBlock)
    looping_forward_kernel(const __grid_constant__ ForwardParams<typename Tr::T> p) {
  using T = typename Tr::T;
  using A = Acc<T>;
  constexpr int kStep = Tr::kThreads * Tr::kPackElems;
  __shared__ A scratch[2][Tr::kThreads / device::kWarpSize];
  const int64_t row_idx = blockIdx.x;
  const auto x = row_of(p.x, p.shape, row_idx);
  const auto y = row_of(p.y, p.shape, row_idx);
  const int64_t visible = visible_of(p.shape, row_idx);
  const T fill = device::from_acc<T>(device::negative_infinity<A>());

  A best = device::negative_infinity<A>();
  A sum = 0;
  for (int64_t col = pack_col<Tr>(0); col < visible; col += kStep) {
    Pack<T, Tr::kPackElems> in;
    load_visible<Tr>(x, col, visible, fill, in);
    A grown = best;
#pragma unroll
    for (int i = 0; i < Tr::kPackElems; ++i) {
      grown = device::Max{}(device::to_acc(in[i]), grown);
    }
    // While every score is -Inf the shift is 0, so that exp gives 0 and not NaN; the row's own rule comes at
    // the end.
    const A shift = grown == device::negative_infinity<A>() ? A(0) : grown;
    sum *= device::exp_for<T>(best - shift);
    best = grown;
#pragma unroll
    for (int i = 0; i < Tr::kPackElems; ++i) {
      sum += col + i < visible ? device::exp_for<T>(device::to_acc(in[i]) - shift) : A(0);
    }
  }
  const A row_best = row_reduce<Tr, device::Max>(best, scratch[0]);
  const A shift = row_best == device::negative_infinity<A>() ? A(0) : row_best;
  const A row_sum = row_reduce<Tr, device::Sum>(sum * device::exp_for<T>(best - shift), scratch[1]);
  const A scale = A(1) / row_sum;  // a row of -Inf: 0 * (1 / 0) = NaN, as torch.softmax
  for (int64_t col = pack_col<Tr>(0); col < p.shape.cols; col += kStep) {
    Pack<T, Tr::kPackElems> value;
    load_visible<Tr>(x, col, visible, fill, value);
#pragma unroll
    for (int i = 0; i < Tr::kPackElems; ++i) {
      const A e = device::exp_for<T>(device::to_acc(value[i]) - shift) * scale;
      value[i] = device::from_acc<T>(col + i < visible ? e : A(0));
    }
    store_row_pack<Tr>(y, col, p.shape.cols, value);
  }
}

template <typename Tr>
__global__ void __launch_bounds__(Tr::kBlock)
    looping_backward_kernel(const __grid_constant__ BackwardParams<typename Tr::T> p) {
  using T = typename Tr::T;
  using A = Acc<T>;
  constexpr int kStep = Tr::kThreads * Tr::kPackElems;
  __shared__ A scratch[Tr::kThreads / device::kWarpSize];
  const int64_t row_idx = blockIdx.x;
  const auto dy_row = row_of(p.dy, p.shape, row_idx);
  const auto y_row = row_of(p.y, p.shape, row_idx);
  const auto dx_row = row_of(p.dx, p.shape, row_idx);
  const int64_t visible = visible_of(p.shape, row_idx);
  const T zero = device::from_acc<T>(A(0));

  A dot = 0;
  for (int64_t col = pack_col<Tr>(0); col < visible; col += kStep) {
    Pack<T, Tr::kPackElems> dy, y;
    load_visible<Tr>(dy_row, col, visible, zero, dy);
    load_visible<Tr>(y_row, col, visible, zero, y);
#pragma unroll
    for (int i = 0; i < Tr::kPackElems; ++i) {
      dot += device::to_acc(dy[i]) * device::to_acc(y[i]);
    }
  }
  dot = row_reduce<Tr, device::Sum>(dot, scratch);
  for (int64_t col = pack_col<Tr>(0); col < p.shape.cols; col += kStep) {
    Pack<T, Tr::kPackElems> dy, y;
    load_visible<Tr>(dy_row, col, visible, zero, dy);
    load_visible<Tr>(y_row, col, visible, zero, y);
#pragma unroll
    for (int i = 0; i < Tr::kPackElems; ++i) {
      const A gradient = device::to_acc(y[i]) * (device::to_acc(dy[i]) - dot);
      y[i] = device::from_acc<T>(col + i < visible ? gradient : A(0));
    }
    store_row_pack<Tr>(dx_row, col, p.shape.cols, y);
  }
}

}  // namespace htree::causal_softmax
