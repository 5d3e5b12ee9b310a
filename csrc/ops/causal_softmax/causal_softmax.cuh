// Kernels of causal_softmax, docs/semantics/causal_softmax.md §5. Each row is read once into registers,
// reduced, and written once; rows too long for that go through the looping kernel. Only visible
// elements are ever read.
//
// The streaming kernels (causal_softmax_streaming.cuh) write their rows by the same functions.
#pragma once

#include <cstdint>

#include "device/divmod.cuh"
#include "device/numeric.cuh"
#include "device/pack.cuh"
#include "device/reduce.cuh"
#include "ops/causal_softmax/causal_softmax_params.h"

namespace htree::causal_softmax {

using device::Acc;
using device::Pack;

// How the rows of a batch of matrices are numbered.
struct RowsView {
  device::FastDivisor per_batch;
  uint32_t num_rows;
};

// A row has kThreads threads, each of which holds kElems elements (0: the looping kernels). kVectorised rows
// have unit stride and start at multiples of 16 bytes; other rows go element by element at any column stride.
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

// The row of the matrices that a thread works on.
struct RowIndex {
  int64_t batch;
  int64_t row;

  template <typename T>
  __device__ __forceinline__ Row<T> of(const Matrix<T>& m) const {
    return {m.data + batch * m.batch_stride + row * m.row_stride, m.col_stride};
  }
};

// Sets `index` to the row of this thread. False for the idle warps of the last block.
template <typename Tr>
__device__ __forceinline__ bool row_index(const RowsView& rows, RowIndex& index) {
  const uint32_t row_idx = blockIdx.x * Tr::kRowsPerBlock + threadIdx.x / Tr::kThreads;
  const uint32_t batch = rows.per_batch.quotient(row_idx);
  index = {batch, rows.per_batch.remainder(row_idx, batch)};
  return row_idx < rows.num_rows;
}

// Replaces the elements of `pack` from `visible` on by `fill`, whatever they are.
template <typename Tr, typename Col>
__device__ __forceinline__ void mask_behind(Pack<typename Tr::T, Tr::kPackElems>& pack, Col col, Col visible,
                                            typename Tr::T fill) {
#pragma unroll
  for (int i = 0; i < Tr::kPackElems; ++i) {
    pack[i] = col + i < visible ? pack[i] : fill;
  }
}

// Elements [col, col + kPackElems) of a row, with `fill` from `visible` on. What lies behind may be NaN and
// is never read: a pack across the boundary is read element by element.
template <typename Tr, typename Col>
__device__ __forceinline__ Pack<typename Tr::T, Tr::kPackElems> load_visible(
    const Row<const typename Tr::T>& row, Col col, Col visible, typename Tr::T fill) {
  Pack<typename Tr::T, Tr::kPackElems> out;
#pragma unroll
  for (int i = 0; i < Tr::kPackElems; ++i) {
    out[i] = fill;
  }
  if (!Tr::kStrided && col + Tr::kPackElems <= visible) {
    out = device::load_pack<Tr::kPackElems>(row.data + col);
  } else if (col < visible) {
#pragma unroll
    for (int i = 0; i < Tr::kPackElems; ++i) {
      if (col + i < visible) {
        out[i] = row.data[Tr::kStrided ? (col + i) * row.col_stride : col + i];
      }
    }
  }
  return out;
}

// Stores the values of a pack, and from `visible` on +0, even in a row of NaN. Where a pack lies wholly
// behind, its values must be zeros.
template <typename Tr, typename Col>
__device__ __forceinline__ void store_visible(const Row<typename Tr::T>& row, Col col, Col visible, Col cols,
                                              const Acc<typename Tr::T> (&value)[Tr::kPackElems]) {
  using T = typename Tr::T;
  Pack<T, Tr::kPackElems> out;
  device::from_acc<T>(value, out.data);
  if (col < visible && col + Tr::kPackElems > visible) {
    mask_behind<Tr>(out, col, visible, device::from_acc<T>(Acc<T>(0)));
  }
  if (!Tr::kStrided && col + Tr::kPackElems <= cols) {
    device::store_pack_streaming(row.data + col, out);
    return;
  }
#pragma unroll
  for (int i = 0; i < Tr::kPackElems; ++i) {
    if (col + i < cols) {
      row.data[Tr::kStrided ? (col + i) * row.col_stride : col + i] = out[i];
    }
  }
}

// A reduction over the threads of one row, which are a warp or the whole block.
template <typename Tr, typename Op, typename A>
__device__ __forceinline__ A row_reduce(A value, A* scratch) {
  if constexpr (Tr::kThreads == device::kWarpSize) {
    return device::warp_reduce<Op>(value);
  } else {
    return device::block_reduce<Tr::kThreads, Op>(value, scratch);
  }
}

template <typename Tr>
__device__ __forceinline__ int pack_col(int pack) {
  return (pack * Tr::kThreads + static_cast<int>(threadIdx.x % Tr::kThreads)) * Tr::kPackElems;
}

// e^(x - maximum), and the same divided by a sum. For half types it is the hardware's 2^x with everything
// else folded into one multiply-add (an error of 2^-17 at |x - maximum| = 80, far below their rounding). For
// other types it stays accurate.
template <typename T>
struct Exponential {
  using A = Acc<T>;
  static constexpr float kLog2E = 1.44269504088896341f;
  A rate;
  A shift;

  // `shift` is rounded, which multiplies the whole row by a common factor. That factor is harmless unless it
  // comes near 2^128. So beyond 2^24 (bf16 only) the rate is a power of two, which rounds nothing. Other
  // values differ from such a maximum by at least 2^17, and e^ of that is 0 at either rate.
  __device__ __forceinline__ explicit Exponential(A maximum)
      : rate(fabsf(static_cast<float>(maximum)) > 16777216.0f ? 0.5f : kLog2E),
        shift(sizeof(T) == 2 ? maximum * rate : maximum) {}

  __device__ __forceinline__ A operator()(A x) const {
    if constexpr (sizeof(T) == 2) {
      return device::exp2_flushed(fmaf(x, rate, -shift));
    } else {
      return device::exp_for<T>(x - shift);
    }
  }

  // The factor that turns a sum of these into a sum of `next`, whose maximum is no smaller. It must come from
  // the shifts, which are rounded: the rounding of this one's shift is in the terms of the sum already.
  __device__ __forceinline__ A to_terms_of(const Exponential& next) const {
    const A apart = min(shift - next.shift, A(0));  // above 0 only from the shift of an empty sum
    if constexpr (sizeof(T) == 2) {
      return rate == next.rate ? device::exp2_flushed(apart) : 0.0f;
    } else {
      return device::exp_for<T>(apart);
    }
  }
};

// Makes the compiler convert the elements again where they are next used. A thread of a block of 1024 has 64
// registers: arithmetic values kept from one pass over the row to the next would spill.
template <typename Tr>
__device__ __forceinline__ void drop_conversions(Pack<typename Tr::T, Tr::kPackElems>& pack) {
  if constexpr (sizeof(typename Tr::T) == 2 && Tr::kBlock == 1024 && Tr::kPackElems > 1) {
    auto* words = reinterpret_cast<uint32_t*>(&pack);
#pragma unroll
    for (int word = 0; word < Tr::kPackElems / 2; ++word) {
      asm volatile("" : "+r"(words[word]));
    }
  }
}

// The packs of a row that a thread holds.
template <typename Tr>
using RowPacks = Pack<typename Tr::T, Tr::kPackElems>[Tr::kPacks];

// Writes the softmax of the row in `value`; `best` is the maximum over the calling thread's packs. A NaN is
// not the maximum, but makes the sum, hence the row, NaN; so do +Inf and a row of -Inf.
template <typename Tr>
__device__ __forceinline__ void write_softmax(
    const Row<typename Tr::T>& y, const RowPacks<Tr>& value, Acc<typename Tr::T> best, int visible, int cols,
    Acc<typename Tr::T> (&scratch)[2][Tr::kThreads / device::kWarpSize]) {
  using A = Acc<typename Tr::T>;
  best = row_reduce<Tr, device::Max>(best, scratch[0]);
  const Exponential<typename Tr::T> exponential(best);
  A sum = 0;
  A kept[Tr::kPacks][Tr::kPackElems];
#pragma unroll
  for (int pack = 0; pack < Tr::kPacks; ++pack) {
    if (pack_col<Tr>(pack) < visible) {
#pragma unroll
      for (int i = 0; i < Tr::kPackElems; ++i) {
        kept[pack][i] = exponential(device::to_acc(value[pack][i]));
        sum += kept[pack][i];
      }
    }
  }
  const A scale = A(1) / row_reduce<Tr, device::Sum>(sum, scratch[1]);
#pragma unroll
  for (int pack = 0; pack < Tr::kPacks; ++pack) {
    A out[Tr::kPackElems] = {};
    if (pack_col<Tr>(pack) < visible) {
#pragma unroll
      for (int i = 0; i < Tr::kPackElems; ++i) {
        out[i] = kept[pack][i] * scale;
      }
    }
    store_visible<Tr>(y, pack_col<Tr>(pack), visible, cols, out);
  }
}

// The part of sum(dy y) that a pack adds.
template <typename Tr>
__device__ __forceinline__ Acc<typename Tr::T> pack_dot(const Pack<typename Tr::T, Tr::kPackElems>& dy,
                                                        const Pack<typename Tr::T, Tr::kPackElems>& y,
                                                        Acc<typename Tr::T> dot) {
#pragma unroll
  for (int i = 0; i < Tr::kPackElems; ++i) {
    dot += device::to_acc(dy[i]) * device::to_acc(y[i]);
  }
  return dot;
}

// Writes dx = y (dy - dot) on the visible prefix, 0 behind it.
template <typename Tr>
__device__ __forceinline__ void write_gradient(const Row<typename Tr::T>& dx_row, RowPacks<Tr>& dy,
                                               RowPacks<Tr>& y, Acc<typename Tr::T> dot, int visible,
                                               int cols) {
#pragma unroll
  for (int pack = 0; pack < Tr::kPacks; ++pack) {
    Acc<typename Tr::T> dx[Tr::kPackElems] = {};
    if (pack_col<Tr>(pack) < visible) {
      drop_conversions<Tr>(dy[pack]);
      drop_conversions<Tr>(y[pack]);
#pragma unroll
      for (int i = 0; i < Tr::kPackElems; ++i) {
        dx[i] = device::to_acc(y[pack][i]) * (device::to_acc(dy[pack][i]) - dot);
      }
    }
    store_visible<Tr>(dx_row, pack_col<Tr>(pack), visible, cols, dx);
  }
}

template <typename Tr>
__global__ void __launch_bounds__(Tr::kBlock)
    forward_kernel(const __grid_constant__ ForwardParams<typename Tr::T> p,
                   const __grid_constant__ RowsView rows) {
  using T = typename Tr::T;
  using A = Acc<T>;
  __shared__ A scratch[2][Tr::kThreads / device::kWarpSize];
  RowIndex index;
  if (!row_index<Tr>(rows, index)) {
    return;  // whole warps alone return: kRowsPerBlock > 1 implies one warp per row
  }
  const auto x = index.of(p.x);
  const auto y = index.of(p.y);
  const int cols = static_cast<int>(p.shape.cols);
  const int visible = static_cast<int>(p.shape.cols - p.shape.rows + 1 + index.row);

  Pack<T, Tr::kPackElems> value[Tr::kPacks];
  const T fill = device::from_acc<T>(device::negative_infinity<A>());
#pragma unroll
  for (int pack = 0; pack < Tr::kPacks; ++pack) {
    value[pack] = load_visible<Tr>(x, pack_col<Tr>(pack), visible, fill);
  }
  A best = device::negative_infinity<A>();
#pragma unroll
  for (int pack = 0; pack < Tr::kPacks; ++pack) {
    best = device::Max{}(device::max_of(value[pack].data), best);
  }
  write_softmax<Tr>(y, value, best, visible, cols, scratch);
}

// dx = y (dy - sum(dy y)) on the visible prefix, 0 behind it.
template <typename Tr>
__global__ void __launch_bounds__(Tr::kBlock)
    backward_kernel(const __grid_constant__ BackwardParams<typename Tr::T> p,
                    const __grid_constant__ RowsView rows) {
  using T = typename Tr::T;
  using A = Acc<T>;
  __shared__ A scratch[Tr::kThreads / device::kWarpSize];
  RowIndex index;
  if (!row_index<Tr>(rows, index)) {
    return;
  }
  const auto dy_row = index.of(p.dy);
  const auto y_row = index.of(p.y);
  const auto dx_row = index.of(p.dx);
  const int cols = static_cast<int>(p.shape.cols);
  const int visible = static_cast<int>(p.shape.cols - p.shape.rows + 1 + index.row);

  Pack<T, Tr::kPackElems> dy[Tr::kPacks];
  Pack<T, Tr::kPackElems> y[Tr::kPacks];
  const T zero = device::from_acc<T>(A(0));
#pragma unroll
  for (int pack = 0; pack < Tr::kPacks; ++pack) {
    dy[pack] = load_visible<Tr>(dy_row, pack_col<Tr>(pack), visible, zero);
    y[pack] = load_visible<Tr>(y_row, pack_col<Tr>(pack), visible, zero);
  }
  A dot = 0;
#pragma unroll
  for (int pack = 0; pack < Tr::kPacks; ++pack) {
    if (pack_col<Tr>(pack) < visible) {
      dot = pack_dot<Tr>(dy[pack], y[pack], dot);
    }
  }
  write_gradient<Tr>(dx_row, dy, y, row_reduce<Tr, device::Sum>(dot, scratch), visible, cols);
}

// For rows of any length: one pass finds maximum and sum (scaled anew whenever the maximum grows), one
// writes. y may be x: a thread writes only what it alone reads.
template <typename Tr>
__global__ void __launch_bounds__(Tr::kBlock)
    looping_forward_kernel(const __grid_constant__ ForwardParams<typename Tr::T> p,
                           const __grid_constant__ RowsView rows) {
  using T = typename Tr::T;
  using A = Acc<T>;
  constexpr int64_t kStep = Tr::kThreads * Tr::kPackElems;
  __shared__ A scratch[2][Tr::kThreads / device::kWarpSize];
  RowIndex index;
  row_index<Tr>(rows, index);
  const auto x = index.of(p.x);
  const auto y = index.of(p.y);
  const int64_t cols = p.shape.cols;
  const int64_t visible = cols - p.shape.rows + 1 + index.row;
  const T fill = device::from_acc<T>(device::negative_infinity<A>());

  // While every score is -Inf the shift is 0, so that exp gives 0 and not NaN. A row of -Inf gets its
  // NaN at the end.
  const auto exponential_below = [](A maximum) {
    return Exponential<T>(maximum == device::negative_infinity<A>() ? A(0) : maximum);
  };
  A best = device::negative_infinity<A>();
  Exponential<T> own = exponential_below(best);
  A sum = 0;
  for (int64_t col = pack_col<Tr>(0); col < visible; col += kStep) {
    const auto in = load_visible<Tr>(x, col, visible, fill);
#pragma unroll
    for (int i = 0; i < Tr::kPackElems; ++i) {
      best = device::Max{}(device::to_acc(in[i]), best);
    }
    const Exponential<T> grown = exponential_below(best);
    sum *= own.to_terms_of(grown);
    own = grown;
#pragma unroll
    for (int i = 0; i < Tr::kPackElems; ++i) {
      sum += own(device::to_acc(in[i]));
    }
  }
  const Exponential<T> exponential = exponential_below(row_reduce<Tr, device::Max>(best, scratch[0]));
  const A row_sum = row_reduce<Tr, device::Sum>(sum * own.to_terms_of(exponential), scratch[1]);
  const A scale = A(1) / row_sum;  // a row of -Inf: 0 * (1 / 0) = NaN, as in torch.softmax
  for (int64_t col = pack_col<Tr>(0); col < cols; col += kStep) {
    const auto in = load_visible<Tr>(x, col, visible, fill);
    A out[Tr::kPackElems] = {};
    if (col < visible) {
#pragma unroll
      for (int i = 0; i < Tr::kPackElems; ++i) {
        out[i] = exponential(device::to_acc(in[i])) * scale;
      }
    }
    store_visible<Tr>(y, col, visible, cols, out);
  }
}

template <typename Tr>
__global__ void __launch_bounds__(Tr::kBlock)
    looping_backward_kernel(const __grid_constant__ BackwardParams<typename Tr::T> p,
                            const __grid_constant__ RowsView rows) {
  using T = typename Tr::T;
  using A = Acc<T>;
  constexpr int64_t kStep = Tr::kThreads * Tr::kPackElems;
  __shared__ A scratch[Tr::kThreads / device::kWarpSize];
  RowIndex index;
  row_index<Tr>(rows, index);
  const auto dy_row = index.of(p.dy);
  const auto y_row = index.of(p.y);
  const auto dx_row = index.of(p.dx);
  const int64_t cols = p.shape.cols;
  const int64_t visible = cols - p.shape.rows + 1 + index.row;
  const T zero = device::from_acc<T>(A(0));

  A dot = 0;
  for (int64_t col = pack_col<Tr>(0); col < visible; col += kStep) {
    const auto dy = load_visible<Tr>(dy_row, col, visible, zero);
    const auto y = load_visible<Tr>(y_row, col, visible, zero);
#pragma unroll
    for (int i = 0; i < Tr::kPackElems; ++i) {
      dot += device::to_acc(dy[i]) * device::to_acc(y[i]);
    }
  }
  dot = row_reduce<Tr, device::Sum>(dot, scratch);
  for (int64_t col = pack_col<Tr>(0); col < cols; col += kStep) {
    const auto dy = load_visible<Tr>(dy_row, col, visible, zero);
    const auto y = load_visible<Tr>(y_row, col, visible, zero);
    A dx[Tr::kPackElems] = {};
    if (col < visible) {
#pragma unroll
      for (int i = 0; i < Tr::kPackElems; ++i) {
        dx[i] = device::to_acc(y[i]) * (device::to_acc(dy[i]) - dot);
      }
    }
    store_visible<Tr>(dx_row, col, visible, cols, dx);
  }
}

}  // namespace htree::causal_softmax
