// Kernels for scales down the columns of contiguous matrices: the largest magnitude of each column's group,
// and the elementwise jobs. A block takes a strip of columns and a run of rows.
#pragma once

#include "device/sm90/pdl.cuh"
#include "ops/fp8/quantize/emit.cuh"
#include "ops/fp8/quantize/quantize_config.h"

namespace htree::fp8 {

// The groups of `group` rows of each matrix of `length` rows, split over blocks.
struct ColumnGrid {
  int64_t cols;
  int64_t group;
  int64_t length;
  uint32_t groups_per_matrix;
  uint32_t num_groups;  // groups of all matrices
  uint32_t num_splits;
  uint32_t num_tiles;  // tiles of kColumnLanes packs across the columns
};

// The pack of columns of a thread, and its rows: every kColumnRows-th row of a run of its group.
struct ColumnSlice {
  uint32_t group_idx;
  uint32_t split;
  int64_t col;
  int64_t first_row;  // first row of the group, among the rows of all matrices
  int64_t begin;      // first row of the thread, counted from first_row
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

// Packs that a thread loads before it uses the first.
constexpr int kColumnBatch = 4;

template <typename T>
struct LargestColumnParams {
  const T* x;
  ColumnGrid grid;
  uint32_t* partial;  // [num_splits, num_groups, cols]
  float* scale;       // [num_groups, cols]: written where there is one split; else null
};

template <typename T, int kPack>
__global__ void __launch_bounds__(kColumnLanes* kColumnRows)
    largest_column_kernel(const __grid_constant__ LargestColumnParams<T> p) {
  __shared__ uint32_t scratch[kColumnRows][kColumnLanes * kPack];
  const auto slice = ColumnSlice::of<kPack>(p.grid);
  device::pdl_launch_and_wait();
  const T* x = p.x + slice.first_row * p.grid.cols + slice.col;
  using Magnitudes = MagnitudeWords<T, kPack>;
  Magnitudes best;
  for (int64_t begin = slice.begin; begin < slice.end; begin += kColumnBatch * kColumnRows) {
    Pack<T, kPack> value[kColumnBatch];
#pragma unroll
    for (int i = 0; i < kColumnBatch; ++i) {
      const int64_t row = begin + i * kColumnRows;
      value[i] = load_held<kPack>(row < slice.end, x + row * p.grid.cols);
    }
    Magnitudes most;
#pragma unroll
    for (int i = 0; i < kColumnBatch; ++i) {
      most.raise_to(Magnitudes::of(value[i]));
    }
    if (most.has_special()) {
      most = {};
#pragma unroll
      for (int i = 0; i < kColumnBatch; ++i) {
        auto finite = Magnitudes::of(value[i]);
        finite.keep_finite();
        most.raise_to(finite);
      }
    }
    best.raise_to(most);
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

// Works on the rows of a slice. Returns whether an element goes beyond the rounding limit.
template <typename Job, int kPack, typename Scale>
__device__ __forceinline__ bool apply_rows(const ColumnParams<typename Job::In, typename Job::Out>& p,
                                           const ColumnSlice& slice, const Scale& scale) {
  const int64_t first = slice.first_row * p.grid.cols + slice.col;
  constexpr int64_t kStep = kColumnBatch * kColumnRows;
  bool is_beyond = false;
  // It goes from the last rows to the first, because the search for the largest magnitude has left the last
  // ones in the L2 cache.
  for (int64_t step = (slice.end - slice.begin - 1) / kStep; step >= 0; --step) {
    const int64_t begin = slice.begin + step * kStep;
    Held<typename Job::In, kPack> value[kColumnBatch];
    Held<typename Job::Out, kPack> upstream[kIsBackward<Job> ? kColumnBatch : 1];
#pragma unroll
    for (int i = 0; i < kColumnBatch; ++i) {
      const int64_t row = begin + i * kColumnRows;
      value[i] = load_held<kPack>(row < slice.end, p.x + first + row * p.grid.cols);
      if constexpr (kIsBackward<Job>) {
        upstream[i] = load_held<kPack>(row < slice.end, p.dy + first + row * p.grid.cols);
      }
    }
#pragma unroll
    for (int i = 0; i < kColumnBatch; ++i) {
      const int64_t row = begin + i * kColumnRows;
      if constexpr (kEncodes<Job>) {
        is_beyond |= exceeds_limit(value[i], scale);
      }
      if (row < slice.end) {
        store_result<kPack>(p.out + first + row * p.grid.cols,
                            Job::template apply<kPack>(value[i], upstream[kIsBackward<Job> ? i : 0], scale));
      }
    }
  }
  return is_beyond;
}

template <typename Job, int kPack>
__global__ void __launch_bounds__(kColumnLanes* kColumnRows)
    column_kernel(const __grid_constant__ ColumnParams<typename Job::In, typename Job::Out> p) {
  const auto slice = ColumnSlice::of<kPack>(p.grid);
  device::pdl_launch_and_wait();
  const float* scale = p.scale + slice.group_idx * p.grid.cols + slice.col;
  const bool has_rows = slice.begin < slice.end;
  bool is_beyond = false;
  if (has_rows) {
    bool is_quick = kDivides<Job>;
    if constexpr (kDivides<Job>) {
#pragma unroll
      for (int i = 0; i < kPack; ++i) {
        is_quick &= is_moderate(scale[i]);
      }
    }
    if (is_quick) {
      apply_rows<Job, kPack>(p, slice, LaneScales<kPack, true>(scale));
    } else {
      is_beyond = apply_rows<Job, kPack>(p, slice, LaneScales<kPack, false>(scale));
    }
  }
  if constexpr (kEncodes<Job>) {
    if (__any_sync(device::kFullMask, is_beyond)) {
      int count = 0;
      for (int64_t row = slice.begin; row < slice.end; row += kColumnRows) {
        const int64_t offset = (slice.first_row + row) * p.grid.cols + slice.col;
        count += count_overflow(device::load_pack<kPack>(p.x + offset), LaneScales<kPack, false>(scale));
      }
      add_overflow(count, p.num_overflow);
    }
  }
}

}  // namespace htree::fp8
