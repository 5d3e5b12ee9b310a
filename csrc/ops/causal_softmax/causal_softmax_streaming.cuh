// Kernels of causal_softmax for many rows, docs/semantics/causal_softmax.md §5: the threads of a row go on
// from row to row, and the next rows are copied to shared memory while one is reduced and stored.
#pragma once

#include <cstdint>

#include "device/mma.cuh"
#include "ops/causal_softmax/causal_softmax.cuh"

namespace htree::causal_softmax {

// The traits of rows with kStages copies on their way.
template <typename T, int kThreads, int kRowsPerBlock, int kElems, int kStages_>
struct StreamTraits : Traits<T, kThreads, kRowsPerBlock, kElems, /*kVectorised=*/true> {
  static constexpr int kStages = kStages_;
};

// The ring of rows that kThreads threads copy to shared memory. A thread reads back only what it copied
// itself, so it waits for its own copies and for no other thread.
template <typename Tr, int kTensors>
class RowRing {
 public:
  using T = typename Tr::T;
  using P = Pack<T, Tr::kPackElems>;

  __device__ __forceinline__ RowRing(const Matrix<const T> (&tensors)[kTensors], const Shape& shape,
                                     const RowsView& rows, unsigned char* shared)
      : tensors_(tensors),
        rows_(rows),
        hidden_(static_cast<int>(shape.rows) - 1),
        cols_(static_cast<int>(shape.cols)),
        base_(device::shared_address(shared) + threadIdx.x * 16) {}

  __device__ __forceinline__ int visible(const RowIndex& index) const {
    return cols_ - hidden_ + static_cast<int>(index.row);
  }

  __device__ __forceinline__ RowIndex index_of(uint32_t row) const {
    const uint32_t batch = rows_.per_batch.quotient(row);
    return {batch, rows_.per_batch.remainder(row, batch)};
  }

  // Starts the copies of a row into `slot` of the ring. Beyond the last row it commits an empty group, which
  // keeps the count right.
  __device__ __forceinline__ void start(uint32_t row, int slot) const {
    if (row < rows_.num_rows) {
      const RowIndex index = index_of(row);
      const int row_visible = visible(index);
#pragma unroll
      for (int tensor = 0; tensor < kTensors; ++tensor) {
        const T* data = index.of(tensors_[tensor]).data;
#pragma unroll
        for (int pack = 0; pack < Tr::kPacks; ++pack) {
          const int col = pack_col<Tr>(pack);
          if (col < row_visible) {
            device::copy_async_16_prefix(address(slot, tensor, pack), data + col,
                                         min(16, (row_visible - col) * static_cast<int>(sizeof(T))));
          }
        }
      }
    }
    device::commit_copies();
  }

  // A pack of the row in `slot`. In the pack at the end of the visible prefix, zeros follow the prefix.
  __device__ __forceinline__ P take(int slot, int tensor, int pack) const {
    P out;
    auto* words = reinterpret_cast<uint32_t*>(&out);
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address(slot, tensor, pack))
                 : "memory");
    return out;
  }

 private:
  __device__ __forceinline__ uint32_t address(int slot, int tensor, int pack) const {
    return base_ + ((slot * kTensors + tensor) * Tr::kPacks + pack) * Tr::kBlock * 16;
  }

  const Matrix<const T> (&tensors_)[kTensors];
  const RowsView& rows_;
  int hidden_;
  int cols_;
  uint32_t base_;
};

// Calls f(row, slot, refill) for the rows of this thread, each when its copies have arrived. f calls refill()
// as soon as it has taken the row out of its slot.
template <typename Tr, typename Ring, typename F>
__device__ __forceinline__ void for_each_row(const Ring& ring, const RowsView& rows, F&& f) {
  const uint32_t step = gridDim.x * Tr::kRowsPerBlock;
  uint32_t row = blockIdx.x * Tr::kRowsPerBlock + threadIdx.x / Tr::kThreads;
#pragma unroll
  for (int slot = 0; slot < Tr::kStages; ++slot) {
    ring.start(row + slot * step, slot);
  }
  for (int slot = 0; row < rows.num_rows; row += step, slot = slot + 1 == Tr::kStages ? 0 : slot + 1) {
    device::wait_copies<Tr::kStages - 1>();
    f(row, slot, [&] { ring.start(row + Tr::kStages * step, slot); });
  }
}

template <typename Tr>
__global__ void __launch_bounds__(Tr::kBlock)
    streaming_forward_kernel(const __grid_constant__ ForwardParams<typename Tr::T> p,
                             const __grid_constant__ RowsView rows) {
  using T = typename Tr::T;
  using A = Acc<T>;
  extern __shared__ __align__(16) unsigned char shared[];
  const Matrix<const T> inputs[1] = {p.x};
  const RowRing<Tr, 1> ring(inputs, p.shape, rows, shared);
  const int cols = static_cast<int>(p.shape.cols);
  const T fill = device::from_acc<T>(device::negative_infinity<A>());
  __shared__ A scratch[2][Tr::kThreads / device::kWarpSize];
  for_each_row<Tr>(ring, rows, [&](uint32_t row, int slot, auto&& refill) {
    const RowIndex index = ring.index_of(row);
    const int visible = ring.visible(index);
    const auto y = index.of(p.y);
    Pack<T, Tr::kPackElems> value[Tr::kPacks];
    A best = device::negative_infinity<A>();
#pragma unroll
    for (int pack = 0; pack < Tr::kPacks; ++pack) {
      const int col = pack_col<Tr>(pack);
      if (col < visible) {
        value[pack] = ring.take(slot, 0, pack);
        if (col + Tr::kPackElems > visible) {
          mask_behind<Tr>(value[pack], col, visible, fill);
        }
        best = device::Max{}(device::max_of(value[pack].data), best);
      }
    }
    refill();
    write_softmax<Tr>(y, value, best, visible, cols, scratch);
  });
}

template <typename Tr>
__global__ void __launch_bounds__(Tr::kBlock)
    streaming_backward_kernel(const __grid_constant__ BackwardParams<typename Tr::T> p,
                              const __grid_constant__ RowsView rows) {
  using T = typename Tr::T;
  using A = Acc<T>;
  extern __shared__ __align__(16) unsigned char shared[];
  const Matrix<const T> inputs[2] = {p.dy, p.y};
  const RowRing<Tr, 2> ring(inputs, p.shape, rows, shared);
  const int cols = static_cast<int>(p.shape.cols);
  __shared__ A scratch[2][Tr::kThreads / device::kWarpSize];
  int parity = 0;  // a warp may be one row ahead of another that still reads its scratch
  for_each_row<Tr>(ring, rows, [&](uint32_t row, int slot, auto&& refill) {
    const RowIndex index = ring.index_of(row);
    const int visible = ring.visible(index);
    const auto dx_row = index.of(p.dx);
    Pack<T, Tr::kPackElems> dy[Tr::kPacks];
    Pack<T, Tr::kPackElems> y[Tr::kPacks];
    A dot = 0;
#pragma unroll
    for (int pack = 0; pack < Tr::kPacks; ++pack) {
      if (pack_col<Tr>(pack) < visible) {
        dy[pack] = ring.take(slot, 0, pack);
        y[pack] = ring.take(slot, 1, pack);
        dot = pack_dot<Tr>(dy[pack], y[pack], dot);
      }
    }
    refill();
    dot = row_reduce<Tr, device::Sum>(dot, scratch[parity]);
    parity ^= 1;
    write_gradient<Tr>(dx_row, dy, y, dot, visible, cols);
  });
}

}  // namespace htree::causal_softmax
