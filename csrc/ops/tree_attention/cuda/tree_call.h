// A call of the tensor-core path: its sizes, its inputs and its tree in device memory, and what both directions do
// with them. No torch.
#pragma once

#include <vector>

#include "ops/tree_attention/cuda/launch_params.h"
#include "ops/tree_attention/cuda/tree/copies.h"
#include "ops/tree_attention/plan/attention_config.h"

namespace htree::tree_attention {

struct TreeLayer {
  TensorView keys;    // [B, N, H_kv, K]
  TensorView values;  // [B, N, H_kv, V]
  int64_t num_nodes = 0;
  int64_t num_parents = 0;
  int64_t node_span = 1;
  char* packed = nullptr;  // [B, H_kv, num_parents] packed parents
};

// A call on one device: sizes, inputs and the tree over the keys, tokens first.
struct TreeCall {
  AttentionProblem problem;
  AttentionConfig config;
  TensorCoreShape shape;
  TensorView queries;  // [B, T_q, H, K]
  std::vector<TreeLayer> layers;
  float2* rope = nullptr;            // [rope_rows(), K/2]
  __half2* rotations = nullptr;      // rotation table of rotation_slots() slots; null for gathers per query
  __half2* top_rotations = nullptr;  // another of RotationOrder::kDims, if config.per_list_top
  DenseTiles top;                    // of layers.back(), if config.dense_top

  int64_t rope_rows() const { return problem.args.top_k * kTensorCoreRate + 1; }
  int64_t rotation_slots() const { return problem.args.top_k + 1; }
  // Rows of masks are aligned to 16 bytes.
  int64_t mask_words() const { return ceil_div(problem.args.top_k * kTensorCoreRate, 128) * 4; }
};

constexpr int64_t kScratchAlign = 256;
inline int64_t aligned(int64_t bytes) {
  return ceil_div(bytes, kScratchAlign) * kScratchAlign;
}

// Batches from `batch`, queries from `query` on.
struct Chunk {
  int64_t batch, num_batches, query, num_queries;
};

// Lists of a chunk at one layer; null for the implicit ones of the top.
struct ListSlice {
  int32_t* data = nullptr;
  int64_t batch = 0;  // stride in elements
};

// A view that starts at a chunk; elements of 2 bytes.
TensorView at_row(TensorView view, int64_t batch, int64_t row);

// Lists are left to the caller.
GatherParams gather_of(const TreeCall& call, size_t layer_idx, const Chunk& chunk);

// Bytes of `scratch` below.
int64_t score_scratch_bytes(const TreeCall& call);

// Selects the lists of the layer below, some leaders at a time; `mask` [num_batches, lists of the chunk,
// H_kv, mask_words()] may be null.
cudaError_t select_layer(const TreeCall& call, size_t layer_idx, const Chunk& chunk, const ListSlice& lists,
                         const ListSlice& next, float* scratch, uint32_t* mask, cudaStream_t stream);

// A layer's tiles from the chunk's first batch on.
DenseTiles dense_tiles_of(const TreeCall& call, const Chunk& chunk);

struct ForwardBuffers {
  void* out = nullptr;   // [B, T_q, H, V]
  float* max = nullptr;  // [B, T_q, H]
  float* sum = nullptr;
  std::vector<int32_t*> parents;  // per layer [B, num_lists, H_kv, k], or empty
  char* scratch = nullptr;        // forward_scratch_bytes()
};

int64_t forward_scratch_bytes(const TreeCall& call);

// Fills call.rope, call.rotations and the blocks of every layer.
cudaError_t run_prepare(const TreeCall& call, cudaStream_t stream);
cudaError_t run_forward(const TreeCall& call, const ForwardBuffers& buffers, cudaStream_t stream);

}  // namespace htree::tree_attention
