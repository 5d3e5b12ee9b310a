// Scales down the columns of contiguous matrices: the largest magnitude of each column's group, and the
// elementwise jobs, a strip of columns and a run of rows to a block.
#pragma once

#include "ops/fp8/quantize/emit.cuh"
#include "ops/fp8/quantize/quantize_config.h"

namespace htree::fp8 {

// Groups of `group` rows of each matrix of `length` rows, split over blocks.
struct ColumnGrid {
  int64_t cols;
  int64_t group;
  int64_t length;
  uint32_t groups_per_matrix;
  uint32_t num_groups;  // of all matrices
  uint32_t num_splits;
  uint32_t num_tiles;  // of kColumnLanes packs across the columns
};

// The pack of columns of a thread, and its rows: every kColumnRows-th of a run of the group's.
struct ColumnSlice {
  uint32_t group_idx;
  uint32_t split;
  int64_t col;
  int64_t first_row;  // of the group, among the rows of all matrices
  int64_t begin;      // of the thread's rows, from first_row
  int64_t end;

  template <int kPack>
  __device__ __forceinline__ static ColumnSlice of(const ColumnGrid& g) {
    ColumnSlice slice;
    const uint32_t tile = blockIdx.x % g.num_tiles;
    const uint32_t rest = blockIdx.x / g.num_tiles;
    slice.split = rest % g.num_splits;
    slice.group_idx = rest / g.num_splits;
    const uint32_t matrix = slice.group_idx / g.groups_per_matrix;
    const int64_t first = (slice.group_idx - matrix * g.groups_per_matrix) * g.group;
    const int64_t num_rows = min(g.group, g.length - first);
    const int64_t run = (num_rows + g.num_splits - 1) / g.num_splits;
    slice.col = (int64_t{tile} * kColumnLanes + threadIdx.x) * kPack;
    slice.first_row = matrix * g.length + first;
    slice.begin = slice.split * run + threadIdx.y;
    slice.end = slice.col < g.cols ? min(num_rows, (slice.split + 1) * run) : 0;
    return slice;
  }
};

template <typename T>
struct LargestColumnParams {
  const T* x;
  ColumnGrid grid;
  uint32_t* partial;  // [num_splits, num_groups, cols]
  float* scale;       // [num_groups, cols]: written where there is one split, else null
};

template <typename T, int kPack>
__global__ void __launch_bounds__(kColumnLanes* kColumnRows)
    largest_column_kernel(const __grid_constant__ LargestColumnParams<T> p) {
  __shared__ uint32_t scratch[kColumnRows][kColumnLanes * kPack];
  const auto slice = ColumnSlice::of<kPack>(p.grid);
  const T* x = p.x + slice.first_row * p.grid.cols + slice.col;
  uint32_t best[kPack] = {};
#pragma unroll 4
  for (int64_t row = slice.begin; row < slice.end; row += kColumnRows) {
    const auto value = device::load_pack<kPack>(x + row * p.grid.cols);
#pragma unroll
    for (int i = 0; i < kPack; ++i) {
      const uint32_t bits = magnitude_bits(value[i]);
      best[i] = bits < kInfinityBits<T> ? MaxBits{}(best[i], bits) : best[i];
    }
  }
#pragma unroll
  for (int i = 0; i < kPack; ++i) {
    scratch[threadIdx.y][i * kColumnLanes + threadIdx.x] = best[i];
  }
  __syncthreads();
  for (int i = threadIdx.y; i < kPack; i += kColumnRows) {
    uint32_t bits = 0;
#pragma unroll
    for (int row = 0; row < kColumnRows; ++row) {
      bits = MaxBits{}(bits, scratch[row][i * kColumnLanes + threadIdx.x]);
    }
    if (slice.col < p.grid.cols) {
      const int64_t scale_idx = slice.group_idx * p.grid.cols + slice.col + i;
      if (p.scale != nullptr) {
        p.scale[scale_idx] = scale_of(magnitude_of<T>(bits));
      } else {
        p.partial[slice.split * p.grid.num_groups * p.grid.cols + scale_idx] = bits;
      }
    }
  }
}

template <typename In, typename Out>
struct ColumnParams {
  const In* x;
  const Out* dy;  // RoundBackward alone
  Out* out;
  const float* scale;  // [num_groups, cols]
  int* num_overflow;   // Encode alone; zero before the launch
  ColumnGrid grid;
};

template <typename Job, int kPack>
__global__ void __launch_bounds__(kColumnLanes* kColumnRows)
    column_kernel(const __grid_constant__ ColumnParams<typename Job::In, typename Job::Out> p) {
  const auto slice = ColumnSlice::of<kPack>(p.grid);
  int count = 0;
  if (slice.begin < slice.end) {
    const LaneScales<kPack> scale(p.scale + slice.group_idx * p.grid.cols + slice.col);
    const int64_t first = slice.first_row * p.grid.cols + slice.col;
#pragma unroll 4
    for (int64_t row = slice.begin; row < slice.end; row += kColumnRows) {
      const int64_t offset = first + row * p.grid.cols;
      const auto value = device::load_pack<kPack>(p.x + offset);
      Pack<typename Job::Out, kPack> upstream{};
      if constexpr (kIsBackward<Job>) {
        upstream = device::load_pack<kPack>(p.dy + offset);
      }
      store_result(p.out + offset, Job::template apply<kPack>(value, upstream, scale));
      if constexpr (kEncodes<Job>) {
        count += count_overflow(value, scale);
      }
    }
  }
  if constexpr (kEncodes<Job>) {
    add_overflow(count, p.num_overflow);
  }
}

}  // namespace htree::fp8
