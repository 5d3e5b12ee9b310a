// Launchers of the gradients of tree attention for every dtype and shape,
// docs/semantics/tree_attention.md §1.10. No torch.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "ops/tree/cuda/launch_params.h"

namespace htree::tree_attention {

struct GeneralHeads {
  int num_kv_heads = 0;
  int group = 0;
  int key_dim = 0;
  int value_dim = 0;
};

struct GeneralLayer {
  TensorView keys;    // [B, N, H_kv, K]
  TensorView values;  // [B, N, H_kv, V]
  int64_t num_nodes = 0;
  int64_t rate = 16;
  int64_t node_span = 1;
};

// Lists are explicit at every layer, the top included. Nodes in `next`, the lists of the layer below, are
// refined and do not take part; `next` is null at the bottom.
struct GeneralLists {
  const int32_t* data = nullptr;  // [B, num_lists, H_kv, width]
  int64_t batch = 0;              // stride in elements
  const int32_t* next = nullptr;
  int64_t next_batch = 0;
  int64_t stride = 1;
  int num_lists = 0;
  int width = 0;  // at the top all parents
  int next_width = 0;
};

// One chunk of queries against one layer.
struct GeneralGradientParams {
  GeneralHeads heads;
  GeneralLayer layer;
  GeneralLists lists;
  TensorView queries;    // [B, T_q, H, K], from the first query of the chunk
  TensorView gradients;  // dO [B, T_q, H, V], from the first query of the chunk
  TensorView outputs;    // O, read by launch_general_delta alone
  RowStates states;
  float* delta = nullptr;        // [num_batches, num_queries, H]: row_delta()
  const float2* rope = nullptr;  // [largest number of candidates, K/2]
  int64_t t0 = 0;
  float scale = 0.f;
  int num_batches = 0;
  int num_queries = 0;
};

struct GeneralQueryGradient {
  float* partial = nullptr;  // [num_batches, num_queries, H, K]: sum over the layers so far
  bool first = false;
  bool last = false;
  void* gradient = nullptr;  // dQ, from the first query of the chunk
  int64_t gradient_batch = 0;
};

struct GeneralKeyGradient {
  const int32_t* counts = nullptr;    // [B, num_lists, H_kv]: parents in a list
  const uint32_t* entries = nullptr;  // as InvertedListParams::entries
  const uint32_t* offsets = nullptr;
  int64_t num_parents = 0;
  float* keys = nullptr;    // [num_batches, H_kv, num_parents * rate, K]; null: not wanted
  float* values = nullptr;  // [num_batches, H_kv, num_parents * rate, V]
  bool add = false;
};

// T is the dtype of the views: float, __half or __nv_bfloat16.
template <typename T>
cudaError_t launch_general_delta(const GeneralGradientParams& params, cudaStream_t stream);
template <typename T>
cudaError_t launch_general_query_gradient(const GeneralGradientParams& params,
                                          const GeneralQueryGradient& query, cudaStream_t stream);
template <typename T>
cudaError_t launch_general_key_gradient(const GeneralGradientParams& params, const GeneralKeyGradient& key,
                                        cudaStream_t stream);

}  // namespace htree::tree_attention
