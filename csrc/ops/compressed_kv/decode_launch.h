// Torch-free launchers of the decode kernels, one set per head size, instantiated in instances/*.cu.
#pragma once

#include <cuda_runtime_api.h>

#include "ops/compressed_kv/general_params.h"

namespace htree::compressed_kv {

// Launch on `stream`, over num_groups = B * H_kv * head_chunks times the splits; the errors are those of the
// runtime. `pair_type` says what 16-bit values are: half or bfloat16; 8 and 4 bits do not ask for it.
// cudaErrorNotSupported: a device without the shared memory.
template <int kHeadDim>
cudaError_t launch_decode(const DecodeParams& p, int k_bits, int v_bits, QueryType pair_type,
                          int64_t num_groups, cudaStream_t stream);
// The same for one width of keys.
template <int kHeadDim, int kKeyBits>
cudaError_t launch_decode_keys(const DecodeParams& p, int v_bits, QueryType pair_type, int64_t num_groups,
                               cudaStream_t stream);

template <int kHeadDim>
cudaError_t launch_general(const GeneralParams& p, int64_t num_groups, cudaStream_t stream);
template <int kHeadDim>
cudaError_t launch_merge(const DecodeParams& p, int64_t num_rows, cudaStream_t stream);
// q [rows, D] to [num_slots, rows, D]; rows = B * H.
template <int kHeadDim>
cudaError_t launch_transform_query(const DecodeParams& p, int64_t num_rows, float* to, cudaStream_t stream);

}  // namespace htree::compressed_kv
