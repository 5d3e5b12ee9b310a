// From the length to the kernel: every power of two up to 2^kMaxLog2Length is compiled.
#pragma once

#include "device/sizes.h"
#include "host/cuda/kernel_launch.h"
#include "ops/hadamard/hadamard.cuh"
#include "ops/hadamard/hadamard_config.h"
#include "ops/hadamard/hadamard_launch.h"

namespace htree::hadamard {
namespace {

// From 2^(11 + this) elements on, rows of the half types are streamed where there are more rows than the
// device runs blocks at one time.
constexpr int kMinStreamedWarpBits = 2;

template <typename P>
RowNumbers number_rows(const P& p) {
  return {device::FastDivisor(static_cast<uint32_t>(p.sizes[1])),
          device::FastDivisor(static_cast<uint32_t>(p.sizes[2])),
          static_cast<uint32_t>(p.sizes[0] * p.sizes[1] * p.sizes[2]), p.sizes[0] * p.sizes[1] == 1};
}

// cudaErrorNotSupported where a block of the device cannot have that much shared memory.
cudaError_t fits(int shared) {
  int most = 0;
  const cudaError_t error = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, most);
  return error == cudaSuccess && shared > most ? cudaErrorNotSupported : error;
}

// Blocks of the streaming kernel per multiprocessor of Hopper, which has 227 KB of shared memory.
template <typename Tr>
constexpr int streaming_blocks(int shared) {
  const int by_registers = kStreamedThreads / Tr::kBlock;
  const int by_shared = 227 * 1024 / (shared + 1024);
  return by_registers < by_shared ? by_registers : by_shared;
}

template <typename T, int kLog2Length>
cudaError_t launch_one(const Params<T>& p, cudaStream_t stream) {
  using Tr = Traits<T, kLog2Length>;
  const RowNumbers rows = number_rows(p);
  constexpr int kShared = Tr::kWarpBits > 0 ? static_cast<int>(sizeof(typename Tr::A)) << kLog2Length : 0;
  if constexpr (sizeof(T) == 2 && Tr::kWarpBits >= kMinStreamedWarpBits) {
    constexpr int kStreamed = kShared + (static_cast<int>(sizeof(T)) << kLog2Length);
    int num_processors = 0;
    const cudaError_t error = device_attribute(cudaDevAttrMultiProcessorCount, num_processors);
    if (error != cudaSuccess) {
      return error;
    }
    const unsigned resident = num_processors * streaming_blocks<Tr>(kStreamed);
    if (p.x.access != Access::kElements && rows.num_rows > resident) {
      const cudaError_t fit = fits(kStreamed);
      if (fit == cudaSuccess) {
        return launch_kernel(streaming_kernel<Tr>, {resident, Tr::kBlock, kStreamed}, stream, p, rows);
      }
      if (fit != cudaErrorNotSupported) {
        return fit;
      }
    }
  }
  if constexpr (kShared > kFreeSharedBytes) {
    if (const cudaError_t fit = fits(kShared); fit != cudaSuccess) {
      return fit;
    }
  }
  const int64_t rows_per_block = int64_t{Tr::kConfig.tiles_per_block()} << Tr::kLog2RowsPerTile;
  const auto blocks = static_cast<unsigned>(ceil_div(rows.num_rows, rows_per_block));
  return launch_kernel(transform_kernel<Tr>, {blocks, Tr::kBlock, kShared}, stream, p, rows);
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

template <typename T>
cudaError_t launch_short(const Params<T>& params, cudaStream_t stream) {
  return launch_between<T, 0, kMaxShortLog2>(params, stream);
}

template <typename T>
cudaError_t launch_long(const Params<T>& params, cudaStream_t stream) {
  constexpr int kMost = is_split(sizeof(T), kMaxLog2Length) ? kMaxLog2Length - 1 : kMaxLog2Length;
  return launch_between<T, kMaxShortLog2 + 1, kMost>(params, stream);
}

template <typename T>
cudaError_t launch_join_halves(const Params<T>& params, cudaStream_t stream) {
  const RowNumbers rows = number_rows(params);
  const unsigned blocks_per_row = 1u << (params.log2_length - 9);
  return launch_kernel(join_halves_kernel<T>, {rows.num_rows * blocks_per_row, 256}, stream, params, rows);
}

}  // namespace htree::hadamard
