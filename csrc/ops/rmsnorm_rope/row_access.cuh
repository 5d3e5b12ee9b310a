// Which rows and columns a thread works on, sums over the threads of a row, and rows that are loaded ahead.
#pragma once

#include <cstdint>

#include "device/divmod.cuh"
#include "device/pack.cuh"
#include "device/reduce.cuh"
#include "ops/rmsnorm_rope/rmsnorm_rope_config.h"
#include "ops/rmsnorm_rope/rmsnorm_rope_params.h"

namespace htree::rmsnorm_rope {

// How rows are numbered: heads change fastest, then batch, then position, so that neighbouring rows share a
// row of the tables. Every block takes `per_block` rows, the first `extra` blocks one more.
struct RowsView {
  device::FastDivisor heads;
  device::FastDivisor batch;
  uint32_t num_rows;
  uint32_t per_block;
  uint32_t extra;

  RowsView(const Shape& shape, int blocks)
      : heads(static_cast<uint32_t>(shape.heads)),
        batch(static_cast<uint32_t>(shape.batch)),
        num_rows(static_cast<uint32_t>(shape.batch * shape.positions * shape.heads)),
        per_block(num_rows / static_cast<uint32_t>(blocks)),
        extra(num_rows % static_cast<uint32_t>(blocks)) {}

  __device__ __forceinline__ uint32_t first_of_block() const {
    return blockIdx.x * per_block + min(blockIdx.x, extra);
  }
  __device__ __forceinline__ uint32_t count_of_block() const {
    return per_block + (blockIdx.x < extra ? 1 : 0);
  }
};

struct RowIndex {
  uint32_t token;  // position * batch size + batch
  uint32_t batch;
  uint32_t position;
  uint32_t head;

  __device__ __forceinline__ RowIndex(const RowsView& rows, uint32_t row) : token(rows.heads.quotient(row)) {
    position = rows.batch.quotient(token);
    head = rows.heads.remainder(row, token);
    batch = rows.batch.remainder(token, position);
  }

  template <typename T>
  __device__ __forceinline__ T* of(const Rows<T>& rows) const {
    return rows.data + batch * rows.batch_stride + position * rows.position_stride + head * rows.head_stride;
  }
};

// Where the threads of a row stand: thread t at pack t % packs_per_half of head t / packs_per_half, and again
// every `step` columns. The `active` threads cover whole heads.
struct LaneGrid {
  device::FastDivisor packs_per_half;
  int active;
  int step;

  LaneGrid(const Shape& shape, int threads, int pack)
      : packs_per_half(static_cast<uint32_t>(shape.head_dim / (2 * pack))),
        active(active_threads(threads, shape.head_dim / (2 * pack))),
        step(active / (shape.head_dim / (2 * pack)) * shape.head_dim) {}
};

template <typename Tr>
struct Columns {
  int in_half;  // column within the half head, at which the tables are read
  int first;    // column of the first lower pack
  int step;
  int half;
  int end;  // a thread whose columns start here or further on has no work

  __device__ __forceinline__ Columns(const LaneGrid& grid, const Shape& shape) {
    const int lane = static_cast<int>(threadIdx.x % Tr::kThreads);
    const int head = static_cast<int>(grid.packs_per_half.quotient(lane));
    in_half = static_cast<int>(grid.packs_per_half.remainder(lane, head)) * Tr::kPack;
    first = head * shape.head_dim + in_half;
    step = grid.step;
    half = shape.head_dim / 2;
    end = lane < grid.active ? shape.width : 0;
  }
  __device__ __forceinline__ int lower(int pair) const { return first + pair * step; }
  __device__ __forceinline__ int upper(int pair) const { return lower(pair) + half; }
  __device__ __forceinline__ bool valid(int pair) const { return lower(pair) < end; }
};

// The sum of 2^n values, neighbours first.
template <int N, typename A>
__device__ __forceinline__ A pairwise_sum(const A (&values)[N]) {
  static_assert((N & (N - 1)) == 0);
  A sums[N];
#pragma unroll
  for (int i = 0; i < N; ++i) {
    sums[i] = values[i];
  }
#pragma unroll
  for (int left = N / 2; left > 0; left /= 2) {
#pragma unroll
    for (int i = 0; i < left; ++i) {
      sums[i] = sums[2 * i] + sums[2 * i + 1];
    }
  }
  return sums[0];
}

// Sums over the threads of one row, in an order that depends on Tr alone; all of them get the results. Rows
// of more than a warp need N * kWarps values of `scratch`, which may be used again after the next call with
// another scratch. They cost one __syncthreads. Every thread of the block must call.
template <typename Tr, int N, typename A>
__device__ __forceinline__ void row_sums(A (&values)[N], A* scratch) {
  constexpr int kLanes = Tr::kThreads < device::kWarpSize ? Tr::kThreads : device::kWarpSize;
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      values[n] += __shfl_xor_sync(device::kFullMask, values[n], offset);
    }
  }
  if constexpr (Tr::kThreads > device::kWarpSize) {
    constexpr int kWarps = Tr::kThreads / device::kWarpSize;
    if (threadIdx.x % device::kWarpSize == 0) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
        scratch[n * kWarps + threadIdx.x / device::kWarpSize] = values[n];
      }
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < N; ++n) {
      if constexpr (kWarps <= 8) {
        A of_warp[kWarps];
#pragma unroll
        for (int warp = 0; warp < kWarps; ++warp) {
          of_warp[warp] = scratch[n * kWarps + warp];
        }
        values[n] = pairwise_sum(of_warp);
      } else {  // in turn, or the backward would spill
        values[n] = scratch[n * kWarps];
#pragma unroll
        for (int warp = 1; warp < kWarps; ++warp) {
          values[n] += scratch[n * kWarps + warp];
        }
      }
    }
  }
}

// Makes the compiler convert the packs anew after a reduction. Otherwise it keeps the floats that it made
// before, in twice the registers of the half types.
template <typename T, int N, int kPairs>
__device__ __forceinline__ void drop_conversions(Pack<T, N> (&packs)[kPairs][2]) {
  if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        auto* words = reinterpret_cast<uint32_t*>(&packs[pair][side]);
#pragma unroll
        for (int word = 0; word < N / 2; ++word) {
          asm volatile("" : "+r"(words[word]));
        }
      }
    }
  }
}

__device__ __forceinline__ void copy_async(void* shared, const void* global) {
  const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(global) : "memory");
}
__device__ __forceinline__ void copy_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Rows of kTensors inputs, `stages` of them under way to shared memory. A thread reads back only what it
// copied itself, so it waits for its own copies and never for another thread. Without kRing the rows are
// loaded when they are taken.
template <typename Tr, int kTensors>
class RowPipeline {
 public:
  using T = typename Tr::T;
  using Packs = Pack<T, Tr::kPack>[Tr::kPairs][2];

  __device__ __forceinline__ RowPipeline(void* shared, int stages)
      : slots_(static_cast<uint4*>(shared) + threadIdx.x), stages_(stages) {}

  // Starts the copies of one more row; `rows` are its starts. Every row that is taken was fetched before, in
  // order. Beyond the last row it is called with `wanted` false.
  __device__ __forceinline__ void fetch(const T* const (&rows)[kTensors], const Columns<Tr>& columns,
                                        bool wanted) {
    if constexpr (Tr::kRing) {
      if (wanted) {
#pragma unroll
        for (int tensor = 0; tensor < kTensors; ++tensor) {
#pragma unroll
          for (int pair = 0; pair < Tr::kPairs; ++pair) {
            if (columns.valid(pair)) {
              copy_async(slot(filling_, tensor, pair, 0), rows[tensor] + columns.lower(pair));
              copy_async(slot(filling_, tensor, pair, 1), rows[tensor] + columns.upper(pair));
            }
          }
        }
      }
      copy_async_commit();
      filling_ = filling_ + 1 == stages_ ? 0 : filling_ + 1;
    }
  }

  // Waits for the oldest row that was fetched; its packs stay in place until `release`.
  __device__ __forceinline__ void wait() {
    if constexpr (Tr::kRing) {
      if (stages_ == 2) {
        copy_async_wait<1>();
      } else {
        copy_async_wait<2>();
      }
    }
  }
  __device__ __forceinline__ void take(int tensor, const T* row, const Columns<Tr>& columns,
                                       Packs& to) const {
    const T zero = device::from_acc<T>(Acc<T>(0));
#pragma unroll
    for (int pair = 0; pair < Tr::kPairs; ++pair) {
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        if (!columns.valid(pair)) {
#pragma unroll
          for (int i = 0; i < Tr::kPack; ++i) {
            to[pair][side][i] = zero;
          }
        } else if constexpr (Tr::kRing) {
          to[pair][side] = *reinterpret_cast<const Pack<T, Tr::kPack>*>(slot(taking_, tensor, pair, side));
        } else {
          to[pair][side] =
              device::load_pack<Tr::kPack>(row + (side == 0 ? columns.lower(pair) : columns.upper(pair)));
        }
      }
    }
  }
  __device__ __forceinline__ void release() {
    if constexpr (Tr::kRing) {
      taking_ = taking_ + 1 == stages_ ? 0 : taking_ + 1;
    }
  }

 private:
  __device__ __forceinline__ uint4* slot(int stage, int tensor, int pair, int side) const {
    return slots_ + (((stage * kTensors + tensor) * Tr::kPairs + pair) * 2 + side) * Tr::kBlock;
  }

  uint4* slots_;
  int stages_;
  int filling_ = 0;
  int taking_ = 0;
};

}  // namespace htree::rmsnorm_rope
