// The sum over rows for dweight, in two steps of fixed order: each block writes the sum over its rows, then
// one kernel adds the blocks.
#pragma once

#include "ops/rmsnorm_rope/operands.cuh"
#include "ops/rmsnorm_rope/row_access.cuh"

namespace htree::rmsnorm_rope {

// Writes `dw`, each thread's sums for its columns, to out [width]. Where several rows share the block, their
// sums are added in order through `shared`, which needs kGroups * width values and may have been in use.
template <typename Tr, typename Weights, typename A>
__device__ __forceinline__ void store_block_sums(const Weights (&dw)[Tr::kPairs], const Columns<Tr>& columns,
                                                 int width, A* shared, A* out) {
  A* own = out;
  if constexpr (Tr::kGroups > 1) {
    __syncthreads();  // other threads may still read their slots of the ring
    own = shared + threadIdx.x / Tr::kThreads * width;
  }
#pragma unroll
  for (int pair = 0; pair < Tr::kPairs; ++pair) {
    if (columns.valid(pair)) {
#pragma unroll
      for (int i = 0; i < Tr::kPack; ++i) {
        own[columns.lower(pair) + i] = dw[pair].lower[i];
        own[columns.upper(pair) + i] = dw[pair].upper[i];
      }
    }
  }
  if constexpr (Tr::kGroups > 1) {
    __syncthreads();
    for (int column = threadIdx.x; column < width; column += Tr::kBlock) {
      A sum = shared[column];
#pragma unroll
      for (int group = 1; group < Tr::kGroups; ++group) {
        sum += shared[group * width + column];
      }
      out[column] = sum;
    }
  }
}

constexpr int kSumColumns = 32;
constexpr int kSumSlices = 16;

// A block has kSumColumns columns. Slice s adds the blocks s, s + kSumSlices, ...; then the slices are added.
template <typename A>
__global__ void __launch_bounds__(kSumColumns* kSumSlices)
    sum_blocks_kernel(const __grid_constant__ SumParams<A> p) {
  __shared__ A partial[kSumSlices][kSumColumns];
  const int column = blockIdx.x * kSumColumns + threadIdx.x % kSumColumns;
  const int slice = threadIdx.x / kSumColumns;
  A sum = 0;
  if (column < p.width) {
#pragma unroll 4
    for (int block = slice; block < p.num_blocks; block += kSumSlices) {
      sum += p.dw_blocks[int64_t{block} * p.width + column];
    }
  }
  partial[slice][threadIdx.x % kSumColumns] = sum;
  __syncthreads();
  if (slice == 0 && column < p.width) {
    for (int other = 1; other < kSumSlices; ++other) {
      sum += partial[other][threadIdx.x];
    }
    store_any(p.out, p.out_dtype, column, sum);
  }
}

}  // namespace htree::rmsnorm_rope
