// Launchers of the tensor-core gradients of tree attention, docs/semantics/tree_attention.md §1.10. Chunks
// and lists as in attention_launch.h. No torch.
//
// Nothing is added with atomics: dQ belongs to a warp per query, dK and dV of a parent's children to one
// block that walks the parent's users in the order of their lists.
#pragma once

#include "ops/tree_attention/cuda/launch_params.h"

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
void launch_gradient_rows(const TensorCoreShape& shape, const RowParams& params, cudaStream_t stream);

// `bounds` [B, H_kv] is zeroed by the caller. Uses the views and sizes of `relay` alone.
void launch_key_bounds(const TensorCoreShape& shape, const RelayParams& relay, KeyBounds* bounds,
                       cudaStream_t stream);

// Bit p of a row's mask = candidate p is in the list of the layer below; counts = parents in the row's list.
// Any r.
struct ListMaskParams {
  const int32_t* lists = nullptr;  // [B, num_lists, H_kv, width]; null: implicit, num_slots from the position
  int64_t list_batch = 0;
  const int32_t* next_lists = nullptr;  // null: no mask wanted
  int64_t next_batch = 0;
  uint32_t* selected = nullptr;  // [B, num_lists, H_kv, mask_words]
  int64_t mask_words = 0;
  int32_t* counts = nullptr;  // [B, num_lists, H_kv]
  int num_batches = 0;
  int num_lists = 0;
  int num_kv_heads = 0;
  int width = 0;
  int64_t rate = 16;
  int64_t t0 = 0;
  int64_t stride = 1;
  int64_t node_span = 1;
};
void launch_list_masks(const ListMaskParams& params, cudaStream_t stream);

// Users of every parent: entries[offsets[h][j] ... offsets[h][j + 1]) = list_row * width + slot of the lists
// of head h (batch * H_kv + kv head) that hold parent j, in the order of the lists.
constexpr int kInverseRows = 256;  // list rows that one block counts and places

struct InverseParams {
  const int32_t* lists = nullptr;  // [B, num_lists, H_kv, width]
  int64_t list_batch = 0;
  int64_t num_parents = 0;
  int num_batches = 0;
  int num_lists = 0;
  int num_kv_heads = 0;
  int width = 0;
  uint32_t* entries = nullptr;     // [B, H_kv, num_lists * width]
  uint32_t* offsets = nullptr;     // [B, H_kv, num_parents + 1]
  uint32_t* run_counts = nullptr;  // [B, H_kv, ceil(num_lists / kInverseRows), num_parents], scratch
};
cudaError_t launch_inverse_lists(const InverseParams& params, cudaStream_t stream);

// Common to both gradients of a layer.
struct GradientParams {
  GatherParams gather;  // its queries are not used
  const char* records = nullptr;
  bool tiled = false;
  const RowMeta* meta = nullptr;
  const KeyBounds* key_bounds = nullptr;
  const QueryBounds* query_bounds = nullptr;
  const uint32_t* selected = nullptr;  // null at the bottom
  int64_t mask_words = 0;
  float scale = 0.f;
};

struct QueryGradientParams {
  GradientParams common;
  bool first = false;
  bool last = false;
  float* partial = nullptr;    // [num_batches, num_queries, H, K] between layers
  void* gradient = nullptr;    // dQ [B, T_q, H, K]
  int64_t gradient_batch = 0;  // stride in elements
};
void launch_query_gradient(const TensorCoreShape& shape, const QueryGradientParams& params,
                           cudaStream_t stream);

struct KeyGradientParams {
  GradientParams common;
  const int32_t* counts = nullptr;    // [B, num_lists, H_kv]
  const uint32_t* entries = nullptr;  // of InverseParams; null: the implicit lists of the top
  const uint32_t* offsets = nullptr;
  float* keys = nullptr;    // [num_batches, H_kv, 16 num_parents, K]; null: not wanted
  float* values = nullptr;  // [num_batches, H_kv, 16 num_parents, V]
  bool add = false;         // to what is there, else replace it
  // For launch_parent_gradient alone: the window of lists, and fp16 turns of every position.
  uint32_t first_list = 0, end_list = 0;
  const __half2* turns = nullptr;
};
void launch_key_gradient(const TensorCoreShape& shape, const KeyGradientParams& params, cudaStream_t stream);

// The same from the users of a window of lists and tiled records, a warp per parent or, for implicit lists,
// four.
// Records of a head whose users all its parents walk at a time: they stay in the L2.
constexpr int64_t kParentWindowBytes = int64_t{16} << 20;
void launch_parent_gradient(const TensorCoreShape& shape, const KeyGradientParams& params,
                            cudaStream_t stream);
// Fills the turns, [num_positions, K/2], from `rope` of the same shape.
void launch_position_turns(const float2* rope, __half2* turns, int64_t num_positions, int key_dim,
                           cudaStream_t stream);

// child[i] += parent[i / r] / (children of the parent), both [heads, nodes, dim] with rows padded to
// multiples of r.
struct PushParams {
  const float* parent = nullptr;  // null: nothing to add
  float* child = nullptr;
  int64_t heads = 0;  // B * H_kv
  int64_t num_nodes = 0;
  int64_t child_rows = 0;  // rows allocated per head
  int64_t parent_rows = 0;
  int64_t dim = 0;
  int64_t rate = 16;
};
void launch_push_gradient(const PushParams& params, cudaStream_t stream);

// As above for the tokens, rounded into `out` [B, N, H_kv, dim] contiguous.
enum class StoreType { kFloat, kHalf, kBFloat16 };
void launch_store_gradient(const PushParams& params, int64_t num_kv_heads, StoreType type, void* out,
                           cudaStream_t stream);

}  // namespace htree::tree_attention
