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

template <typename Word, bool kGather>
__device__ __forceinline__ void copy_rows(const RowCopyParams& p) {
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

// blockIdx.y is the copy.
template <bool kGather>
__global__ void __launch_bounds__(kRowThreads) copy_rows_kernel(const __grid_constant__ RowCopies all) {
  const RowCopyParams& p = all.copies[blockIdx.y];
  if (p.width == 16) {
    copy_rows<uint4, kGather>(p);
  } else if (p.width == 4) {
    copy_rows<uint32_t, kGather>(p);
  } else {
    copy_rows<uint16_t, kGather>(p);
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

LaunchShape shape_of(int64_t rows, int copies) {
  constexpr int64_t kMostBlocks = int64_t{1} << 20;
  const auto blocks = static_cast<unsigned>(std::min(kMostBlocks, ceil_div(rows, kRowThreads / kWarp)));
  return {.grid = dim3(blocks, static_cast<unsigned>(copies)), .threads = kRowThreads};
}

}  // namespace

cudaError_t launch_copy_rows(const RowCopies& copies, bool gathers, cudaStream_t stream) {
  int64_t rows = 0;
  for (int i = 0; i < copies.count; ++i) {
    rows = std::max(rows, copies.copies[i].num_documents * copies.copies[i].rows);
  }
  if (rows == 0) {
    return cudaSuccess;
  }
  return launch_kernel(gathers ? copy_rows_kernel<true> : copy_rows_kernel<false>,
                       shape_of(rows, copies.count), stream, copies);
}

cudaError_t launch_fill_rows(const RowFillParams& params, cudaStream_t stream) {
  if (params.num_rows == 0 || params.row_bytes == 0) {
    return cudaSuccess;
  }
  const auto kernel = params.width == 16  ? fill_rows_kernel<uint4>
                      : params.width == 4 ? fill_rows_kernel<uint32_t>
                                          : fill_rows_kernel<uint16_t>;
  return launch_kernel(kernel, shape_of(params.num_rows, 1), stream, params);
}

}  // namespace htree::tree_attention
