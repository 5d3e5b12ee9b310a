// Records and numbers of the query heads of a chunk: what every kernel of the gradients reads,
// docs/semantics/tree_attention.md §1.10. No torch.
#pragma once

#include "ops/tree_attention/cuda/launch_params.h"
#include "ops/tree_attention/cuda/tree/packed_layer.h"

namespace htree::tree_attention {

// What a query head brings to the gradients, once per chunk: in a record of its query K fp16 (times a power
// of two) and V elements of the gradient of the output, and
struct RowMeta {
  float log_sum;        // log2 of the sum of e^score over the cut
  float delta;          // sum over V of dO * O
  float unscale;        // undoes the power of two of the query
  float gradient_norm;  // |dO|_2
};

// Largest magnitudes per (batch, kv head), bits of non-negative floats; they choose the powers of two that
// keep the gradients of scores in fp16's range.
struct KeyBounds {
  unsigned value_norm;   // |V row|_2
  unsigned key_unscale;  // what undoes the power of two of a key row
};
struct QueryBounds {
  unsigned gradient_norm;
  unsigned query_unscale;
};

struct RowParams {
  TensorView queries;    // [B, T_q, H, K], from the first of the chunk; all three strided, unit last stride
  TensorView gradients;  // dO [B, T_q, H, V]
  TensorView outputs;    // O [B, T_q, H, V]
  const float* max = nullptr;  // [B, T_q, H], natural units
  const float* sum = nullptr;
  int64_t state_batch = 0;
  char* records = nullptr;        // [B, H_kv, num_queries]; null: not wanted
  bool tiled = false;             // records, of up to 8 heads; else [G] rows of 2 (K + V) bytes
  RowMeta* meta = nullptr;        // [B, H_kv, num_queries, G]
  QueryBounds* bounds = nullptr;  // [B, H_kv], zeroed by the caller
  int num_batches = 0;
  int num_queries = 0;
  int num_kv_heads = 0;
  int group = 0;
};
cudaError_t launch_gradient_rows(const TensorCoreShape& shape, const RowParams& params, cudaStream_t stream);

// `bounds` [B, H_kv] is zeroed by the caller. Uses the views and sizes of `relay` alone.
cudaError_t launch_key_bounds(const TensorCoreShape& shape, const PackParams& pack, KeyBounds* bounds,
                              cudaStream_t stream);

}  // namespace htree::tree_attention
