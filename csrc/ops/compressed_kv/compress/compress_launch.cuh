// From the head size to the kernel, for the kernels that prune, compress and decompress.
#pragma once

#include "device/sizes.h"
#include "host/cuda/kernel_launch.h"
#include "ops/compressed_kv/compress/compress.cuh"
#include "ops/compressed_kv/compress/compress_launch.h"
#include "ops/compressed_kv/compress/decompress.cuh"

namespace htree::compressed_kv {
namespace {

template <typename T, int kLanes, bool kWeighted, bool kPrune>
cudaError_t launch_compress_one(const CompressParams& p, cudaStream_t stream) {
  constexpr int64_t kRows = kCompressThreads / kLanes;  // rows of a block
  const auto blocks = static_cast<unsigned>(ceil_div(p.num_rows, kRows));
  return launch_kernel(compress_kernel<T, kLanes, kWeighted, kPrune>, {blocks, kCompressThreads}, stream, p);
}

template <typename T, int kLanes>
cudaError_t launch_compress_of(const CompressParams& p, cudaStream_t stream) {
  if (p.pruned != nullptr) {
    return p.weight != nullptr ? launch_compress_one<T, kLanes, true, true>(p, stream)
                               : launch_compress_one<T, kLanes, false, true>(p, stream);
  }
  return p.weight != nullptr ? launch_compress_one<T, kLanes, true, false>(p, stream)
                             : launch_compress_one<T, kLanes, false, false>(p, stream);
}

template <typename T, int kHeadDim>
cudaError_t launch_decompress_of(const DecompressParams& p, cudaStream_t stream) {
  constexpr int64_t kRows = kDecompressThreads / 32;  // rows of a block
  const auto blocks = static_cast<unsigned>(ceil_div(p.num_rows, kRows));
  return launch_kernel(decompress_kernel<T, kHeadDim>, {blocks, kDecompressThreads}, stream, p);
}

template <typename T, int... kHeadDims>
cudaError_t launch_decompress_among(const DecompressParams& p, cudaStream_t stream) {
  cudaError_t error = cudaErrorInvalidValue;
  ((p.format.head_dim == kHeadDims ? void(error = launch_decompress_of<T, kHeadDims>(p, stream)) : void()),
   ...);
  return error;
}

}  // namespace

template <typename T>
cudaError_t launch_compress(const CompressParams& p, cudaStream_t stream) {
  if (!is_head_dim(p.format.head_dim)) {
    return cudaErrorInvalidValue;
  }
  const int lanes = p.format.head_dim / 32;
  return lanes <= 2   ? launch_compress_of<T, 2>(p, stream)
         : lanes <= 4 ? launch_compress_of<T, 4>(p, stream)
         : lanes <= 8 ? launch_compress_of<T, 8>(p, stream)
                      : launch_compress_of<T, 16>(p, stream);
}

template <typename T>
cudaError_t launch_decompress(const DecompressParams& p, cudaStream_t stream) {
  return launch_decompress_among<T, 64, 128, 192, 256, 320, 384, 448, 512>(p, stream);
}

}  // namespace htree::compressed_kv
