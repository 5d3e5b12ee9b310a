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

// The same, with the width of the keys at run time.
template <int kHeadDim>
cudaError_t launch_decode(const DecodeParams& p, int k_bits, int v_bits, QueryType pair_type,
                          int64_t num_groups, cudaStream_t stream) {
  switch (k_bits) {
    case 4:
      return launch_decode_keys<kHeadDim, 4>(p, v_bits, pair_type, num_groups, stream);
    case 8:
      return launch_decode_keys<kHeadDim, 8>(p, v_bits, pair_type, num_groups, stream);
    case 16:
      return launch_decode_keys<kHeadDim, 16>(p, v_bits, pair_type, num_groups, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace htree::compressed_kv
