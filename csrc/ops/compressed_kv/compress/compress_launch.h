// Torch-free launchers of the kernels that prune, compress and decompress; csrc/instances.py lists them. They
// take raw pointers and sizes.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ops/compressed_kv/format.h"

namespace htree::compressed_kv {

struct CompressParams {
  RowFormat format;
  const void* x;        // rows (b, h, s) of D elements at b * strides[0] + h * strides[1] + s * strides[2]
  int64_t strides[3];   // in elements; rows are aligned to 16 bytes
  const float* weight;  // [B * H_kv, D] or null
  int64_t num_rows;
  int64_t length;    // S
  int num_heads;     // H_kv
  uint32_t* bitmap;  // [rows, D/32]
  uint32_t* values;  // [rows, row_bytes / 4]; null where rows are pruned
  uint16_t* scales;  // [rows]; null with 16 bits
  void* pruned;      // [rows, D]; null where rows are compressed
};

struct DecompressParams {
  RowFormat format;
  const uint32_t* bitmap;
  const uint8_t* values;
  const uint16_t* scales;
  void* out;  // [rows, D]
  int64_t num_rows;
};

// Launch on `stream`; the errors are those of the runtime, and cudaErrorInvalidValue for another head size. T
// is float, __half or __nv_bfloat16.
template <typename T>
cudaError_t launch_compress(const CompressParams& p, cudaStream_t stream);
template <typename T>
cudaError_t launch_decompress(const DecompressParams& p, cudaStream_t stream);

}  // namespace htree::compressed_kv
