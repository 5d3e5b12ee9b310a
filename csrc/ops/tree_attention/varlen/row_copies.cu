// A warp takes a row at a time. Each row is read and written once in accesses of 16 bytes where it is aligned, so
// memory bounds these kernels.
#include <algorithm>

#include "device/sizes.h"
#include "host/cuda/kernel_launch.h"
#include "ops/tree_attention/plan/varlen.h"
#include "ops/tree_attention/varlen/row_copies.h"

namespace htree::tree_attention {
namespace {

constexpr int kWarp = 32, kRowThreads = 256;

template <typename Word>
__device__ __forceinline__ Word repeat(uint32_t bytes) {
  if constexpr (sizeof(Word) == 16) {
    return make_uint4(bytes, bytes, bytes, bytes);
  } else {
    return static_cast<Word>(bytes);
  }
}

// kGather: padded rows are copies of packed ones, or padding. Else packed rows are copies of padded ones.
template <typename Word, bool kGather>
__global__ void __launch_bounds__(kRowThreads) copy_rows_kernel(const RowCopyParams p) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t words = p.row_bytes / static_cast<int64_t>(sizeof(Word));
  const int64_t warps = int64_t{gridDim.x} * (kRowThreads / kWarp);
  const int64_t total = p.num_documents * p.rows;
  for (int64_t row = int64_t{blockIdx.x} * (kRowThreads / kWarp) + threadIdx.x / kWarp; row < total;
       row += warps) {
    const int64_t document = row / p.rows;
    const int32_t* entry = p.table + document * p.table_stride;
    const int64_t at = row - document * p.rows - entry[1];
    const bool real = at >= 0 && at < entry[2];
    if (!real && !kGather) {
      continue;
    }
    Word* padded = reinterpret_cast<Word*>(p.padded + row * p.row_bytes);
    if (!real) {
      for (int64_t i = lane; i < words; i += kWarp) {
        padded[i] = repeat<Word>(p.padding);
      }
      continue;
    }
    Word* packed = reinterpret_cast<Word*>(p.packed + (entry[0] + at) * p.packed_stride);
    const Word* __restrict__ from = kGather ? packed : padded;
    Word* __restrict__ to = kGather ? padded : packed;
#pragma unroll 4
    for (int64_t i = lane; i < words; i += kWarp) {
      to[i] = from[i];
    }
  }
}

template <typename Word>
__global__ void __launch_bounds__(kRowThreads) fill_rows_kernel(const RowFillParams p) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t words = p.row_bytes / static_cast<int64_t>(sizeof(Word));
  const int64_t warps = int64_t{gridDim.x} * (kRowThreads / kWarp);
  for (int64_t row = int64_t{blockIdx.x} * (kRowThreads / kWarp) + threadIdx.x / kWarp; row < p.num_rows;
       row += warps) {
    int64_t low = 0, high = p.num_documents;  // the number of documents that end at or before the row
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (p.starts[middle + 1] <= row) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    const int kind = low < p.num_documents ? p.kinds[low] : -1;
    if (kind == kInGroup) {
      continue;
    }
    Word* to = reinterpret_cast<Word*>(p.packed + row * p.row_bytes);
    const Word value = repeat<Word>(kind == kBroken ? p.nan : p.empty);
    for (int64_t i = lane; i < words; i += kWarp) {
      to[i] = value;
    }
  }
}

template <typename Params>
cudaError_t launch(void (*wide)(Params), void (*word)(Params), void (*half)(Params), const Params& params,
                   int64_t rows, cudaStream_t stream) {
  if (rows == 0 || params.row_bytes == 0) {
    return cudaSuccess;
  }
  constexpr int64_t kMostBlocks = int64_t{1} << 20;
  const auto blocks = static_cast<unsigned>(std::min(kMostBlocks, ceil_div(rows, kRowThreads / kWarp)));
  const LaunchShape shape{.grid = dim3(blocks), .threads = kRowThreads};
  return launch_kernel(params.width == 16 ? wide : params.width == 4 ? word : half, shape, stream, params);
}

}  // namespace

cudaError_t launch_gather_rows(const RowCopyParams& params, cudaStream_t stream) {
  return launch(copy_rows_kernel<uint4, true>, copy_rows_kernel<uint32_t, true>,
                copy_rows_kernel<uint16_t, true>, params, params.num_documents * params.rows, stream);
}

cudaError_t launch_scatter_rows(const RowCopyParams& params, cudaStream_t stream) {
  return launch(copy_rows_kernel<uint4, false>, copy_rows_kernel<uint32_t, false>,
                copy_rows_kernel<uint16_t, false>, params, params.num_documents * params.rows, stream);
}

cudaError_t launch_fill_rows(const RowFillParams& params, cudaStream_t stream) {
  return launch(fill_rows_kernel<uint4>, fill_rows_kernel<uint32_t>, fill_rows_kernel<uint16_t>, params,
                params.num_rows, stream);
}

}  // namespace htree::tree_attention
