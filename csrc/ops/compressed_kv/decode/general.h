// Torch-free launchers of the kernels beside the one for tiles: general decode, the merge of parts, and
// queries in the space of the keys. One set per size of values, or of queries; csrc/instances.py lists them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ops/compressed_kv/decode/decode_params.h"

namespace htree::compressed_kv {

enum class RowKind { kFloat, kHalf, kBfloat16, kPackedHalf, kPackedBfloat16, kBytes, kNibbles };

struct GeneralParams {
  DecodeParams base;    // its tokens are those of the compressed part or of the window
  const void* k_dense;  // [B, H_kv, window, D] for the dense kinds
  const void* v_dense;
  RowKind k_kind;
  RowKind v_kind;
  int key_dim;
};

// Launch on `stream`; the errors are those of the runtime. num_groups = B * H_kv * head_chunks.
template <int kValueDim>
cudaError_t launch_general(const GeneralParams& p, int64_t num_groups, cudaStream_t stream);
template <int kValueDim>
cudaError_t launch_merge(const DecodeParams& p, int64_t num_rows, cudaStream_t stream);
// From q [rows, D] to [num_slots, rows, D]; rows = B * H, D a power of two.
template <int kHeadDim>
cudaError_t launch_transform_query(const DecodeParams& p, int64_t num_rows, float* to, cudaStream_t stream);

}  // namespace htree::compressed_kv
