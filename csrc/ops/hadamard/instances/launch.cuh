// Length to kernel: every power of two up to 2^kMaxLog2Length is listed here.
#pragma once

#include "ops/hadamard/hadamard.cuh"
#include "ops/hadamard/hadamard_launch.h"

namespace htree::hadamard {
namespace {

template <typename P>
RowNumbers number_rows(const P& p) {
  return {device::FastDivisor(static_cast<uint32_t>(p.sizes[1])),
          device::FastDivisor(static_cast<uint32_t>(p.sizes[2])),
          static_cast<uint32_t>(p.sizes[0] * p.sizes[1] * p.sizes[2]), p.sizes[0] * p.sizes[1] == 1};
}

template <typename T, int kLog2Length>
cudaError_t launch_one(const Params<T>& p, cudaStream_t stream) {
  using Tr = Traits<T, kLog2Length>;
  const RowNumbers rows = number_rows(p);
  const int64_t rows_per_block = int64_t{Tr::kConfig.tiles_per_block()} << Tr::kLog2RowsPerTile;
  const dim3 grid(static_cast<unsigned>((rows.num_rows + rows_per_block - 1) / rows_per_block));
  constexpr int kShared = Tr::kWarpBits > 0 ? static_cast<int>(sizeof(typename Tr::A)) << kLog2Length : 0;
  if constexpr (kShared > 48 * 1024) {
    const cudaError_t error =
        cudaFuncSetAttribute(transform_kernel<Tr>, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
    if (error != cudaSuccess) {
      return error;
    }
  }
  transform_kernel<Tr><<<grid, Tr::kBlock, kShared, stream>>>(p, rows);
  return cudaGetLastError();
}

// Tries the lengths 2^kFirst, ..., 2^kLast.
template <typename T, int kFirst, int kLast>
cudaError_t launch_between(const Params<T>& p, cudaStream_t stream) {
  if constexpr (kFirst > kLast) {
    return cudaErrorNotSupported;
  } else {
    return p.log2_length == kFirst ? launch_one<T, kFirst>(p, stream)
                                   : launch_between<T, kFirst + 1, kLast>(p, stream);
  }
}

}  // namespace
}  // namespace htree::hadamard
