// Torch-free launchers of the kernels that prune, compress and decompress; csrc/instances.py lists them.
#pragma once

#include <cuda_runtime_api.h>

#include "ops/compressed_kv/compress_params.h"

namespace htree::compressed_kv {

// Launch on `stream`; the errors are those of the runtime, cudaErrorInvalidValue for another head size.
// T: float, __half or __nv_bfloat16.
template <typename T>
cudaError_t launch_compress(const CompressParams& p, cudaStream_t stream);
template <typename T>
cudaError_t launch_decompress(const DecompressParams& p, cudaStream_t stream);

}  // namespace htree::compressed_kv
