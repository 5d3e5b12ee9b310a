// Torch-free launchers of the decode kernel for tiles; csrc/instances.py lists them.
#pragma once

#include <cuda_runtime_api.h>

#include "ops/compressed_kv/decode/decode_params.h"

namespace htree::compressed_kv {

// Launch on `stream`, over num_groups = B * H_kv * head_chunks times the splits. The errors are those of the
// runtime. `pair_type` says what 16-bit values are, half or bfloat16; for 8 and 4 bits it does not matter.
// cudaErrorNotSupported: the device lacks the shared memory.
template <int kHeadDim, int kKeyBits>
cudaError_t launch_decode_keys(const DecodeParams& p, int v_bits, QueryType pair_type, int64_t num_groups,
                               cudaStream_t stream);

}  // namespace htree::compressed_kv
