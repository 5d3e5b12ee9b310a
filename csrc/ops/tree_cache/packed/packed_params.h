// What the CUDA kernels of packed tokens take: raw pointers and sizes, no torch.
#pragma once

#include "ops/tree_cache/packed/packed_leaves.h"
#include "ops/tree_cache/tree_cache_params.h"

namespace htree::tree_cache {

// The tokens of all pages in one pool, keys or values: codes [num_pages, H_kv, P, row_bytes], aligned to 16 bytes, and
// an fp16 scale for each row.
struct LeafPool {
  uint8_t* codes = nullptr;
  uint16_t* scales = nullptr;
  int row_bytes = 0;
};

struct LeafPools {
  LeafPool keys;
  LeafPool values;
  int bits = 8;  // or 4
};

template <typename T>
struct AppendPackedParams {
  AppendParams<T> append;  // its pools hold nodes and span means
  LeafPools leaves;
  T* key_tail = nullptr;     // [B, H_kv, S, K]
  T* value_tail = nullptr;   // [B, H_kv, S, V]
  uint32_t tail_tokens = 0;  // S
};

template <typename T>
cudaError_t launch_append_packed(const AppendPackedParams<T>& params, cudaStream_t stream);

// launch_attend for packed tokens. Pools and the table of rotations are aligned to 16 bytes.
template <typename T>
cudaError_t launch_attend_packed(const AttendParams<T>& params, const LeafPools& leaves, cudaStream_t stream);
// launch_decode for packed tokens. Their scales are aligned to 16 bytes as well.
template <typename T, int kDim, bool kSpans>
cudaError_t launch_decode_packed(const AttendParams<T>& params, const LeafPools& leaves,
                                 const DecodePlans& plans, cudaStream_t stream);

}  // namespace htree::tree_cache
