// What the launches of the tensor-core kernels share: r = 16, fp16 or bf16 inputs. No torch.
//
// A launch works on one chunk: `num_batches` batches and `num_queries` consecutive queries, the first at token
// t0, a multiple of the selection stride. Queries i with the same i / stride share one list of parents.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime_api.h>
#include <vector_types.h>

#include <cstdint>

#include "ops/tree_attention/plan/layout_sizes.h"
#include "ops/tree_attention/tree_args.h"

namespace htree::tree_attention {

enum class HalfType { kHalf, kBFloat16 };

// [B, rows, heads, D] with a unit last stride; strides in elements.
struct TensorView {
  const void* data = nullptr;
  int64_t batch = 0;
  int64_t row = 0;
  int64_t head = 0;
  bool aligned = false;  // every row starts at a multiple of 16 bytes; only queries say so
};

// What the instances are compiled for.
struct TensorCoreShape {
  HalfType dtype = HalfType::kBFloat16;
  int key_dim = 0;
  int value_dim = 0;
};

// The queries, lists and keys of one layer.
struct GatherParams {
  TensorView queries;            // [B, T_q, H, K], from the first query of the chunk
  const char* packed = nullptr;  // [B, H_kv, num_parents] packed parents of the layer
  int64_t num_parents = 0;
  const int32_t* lists =
      nullptr;             // [B, num_lists, H_kv, list_width]; null: parents 0, 1, ... up to the query's own
  int64_t list_batch = 0;  // stride in elements
  const float2* rope = nullptr;  // [list_width * 16 + 1, K/2]
  float score_scale = 0.f;       // scale * log2(e): scores are in log2 units
  int64_t node_span = 1;         // tokens per node of the layer
  int64_t t0 = 0;
  int num_queries = 0;
  int num_lists = 0;
  int num_batches = 0;
  int num_kv_heads = 0;
  int group = 0;  // G
  int list_width = 0;
  int stride = 1;
};

}  // namespace htree::tree_attention
