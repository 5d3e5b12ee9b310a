// What the kernels of the gradients on tensor cores take, docs/semantics/tree_attention.md §1.10; each is defined in
// the folder of its method. No torch.
#pragma once

#include "ops/tree_attention/cuda/launch_params.h"
#include "ops/tree_attention/cuda/tree/copies.h"

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
template <typename T, int kDim>
cudaError_t launch_gradient_rows(const RowParams& params, cudaStream_t stream);

// `bounds` [B, H_kv] is zeroed by the caller. Uses the views and sizes of `pack` alone.
template <typename T, int kDim>
cudaError_t launch_key_bounds(const PackParams& pack, KeyBounds* bounds, cudaStream_t stream);

// ---- What the gradients of a layer on the tensor cores share, docs/semantics/tree_attention.md §1.10. No torch.
//
// Nothing is added with atomics: dQ belongs to a warp per query, dK and dV of a parent's children to one block that
// walks the parent's users in the order of their lists.

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

// ---- dQ with a gather for every query of its own: sm_80 and later. No torch.

struct QueryGradientParams {
  GradientParams common;
  bool first = false;
  bool last = false;
  float* partial = nullptr;    // [num_batches, num_queries, H, K] between layers
  void* gradient = nullptr;    // dQ [B, T_q, H, K]
  int64_t gradient_batch = 0;  // stride in elements
};
template <typename T, int kDim>
cudaError_t launch_query_gradient(const QueryGradientParams& params, cudaStream_t stream);

// ---- Launcher of dQ by shared gathers on Hopper (sm_90a): r = 16, fp16 or bf16 inputs, K = V in {32, 64, 128}, G
// <= kMaxSharedGatherGroup, docs/semantics/tree_attention.md §1.10. No torch.

// As launch_query_gradient; `rotations` [list_width + 1 slots] in RotationOrder::kFragments.
struct SharedGatherGradientParams {
  QueryGradientParams query;
  const __half2* rotations = nullptr;
};
template <typename T, int kDim>
cudaError_t launch_shared_gather_gradient(const SharedGatherGradientParams& params, cudaStream_t stream);

// ---- dK and dV with a block or a warp for every parent. No torch.

struct KeyGradientParams {
  GradientParams common;
  const int32_t* counts = nullptr;    // [B, num_lists, H_kv]
  const uint32_t* entries = nullptr;  // of InverseParams; null: the implicit lists of the top
  const uint32_t* offsets = nullptr;
  float* keys = nullptr;    // [num_batches, H_kv, 16 num_parents, K]; null: not wanted
  float* values = nullptr;  // [num_batches, H_kv, 16 num_parents, V]
  bool add = false;         // to what is there, else replace it
  // For launch_parent_gradient alone: the window of lists, and fp16 rotations of every position.
  uint32_t first_list = 0, end_list = 0;
  const __half2* rotations = nullptr;
};
template <typename T, int kDim>
cudaError_t launch_key_gradient(const KeyGradientParams& params, cudaStream_t stream);

// Records of a head whose users all its parents walk at a time: they stay in the L2.
constexpr int64_t kParentWindowBytes = int64_t{16} << 20;
// The same from the users of a window of lists and tiled records, a warp per parent or, for implicit lists, four.
template <typename T, int kDim>
cudaError_t launch_parent_gradient(const KeyGradientParams& params, cudaStream_t stream);

// ---- Launchers of the gradients of whole selection blocks on Hopper (sm_90a): r = 16, fp16 or bf16 inputs,
// K = V in {32, 64, 128}, any G, docs/semantics/tree_attention.md §1.10, §1.12. No torch.
//
// Without lists every query takes all parents up to its own, so that neighbours under one parent can share a
// task whatever the selection stride: kGradientRun queries each, with a mask for every query.
//
// One pass over the lists makes all five products of attention's backward while a parent's keys and values
// are in shared memory. dQ stays with its block; what a block adds to dK and dV of a parent leaves as one
// partial sum per (list, slot), and a second kernel adds a parent's partials in the order of the lists.

// Where dQ of a layer goes.
struct PerListQueryGradient {
  bool first = false;  // layer: nothing in `partial` yet
  bool last = false;
  float* partial = nullptr;    // [num_batches, num_queries, H, K] between layers
  void* gradient = nullptr;    // dQ [B, T_q, H, K]; null: not wanted
  int64_t gradient_batch = 0;  // stride in elements
};

// The tasks [first_task, first_task + num_tasks) of a launch and what they leave for dK and dV: [num_tasks, slots]
// partial sums; null: dK and dV are not wanted. A task with m parents writes its first m slots.
struct PerListRun {
  char* partials = nullptr;
  int64_t slots = 0;
  uint32_t first_task = 0;
  uint32_t num_tasks = 0;
};

// A layer of a chunk of queries. Tasks are (batch * kv head, list, block of rows), the last fastest.
struct PerListGradientParams {
  GatherParams gather;
  const __half2* rotations = nullptr;  // rotation table of list_width slots, RotationOrder::kDims
  TensorView gradients;                // dO [B, T_q, H, V], from the first query of the chunk
  const RowMeta* meta = nullptr;       // [B, H_kv, num_queries, G]
  const KeyBounds* key_bounds = nullptr;
  const QueryBounds* query_bounds = nullptr;
  const int32_t* counts = nullptr;     // [B, num_lists, H_kv] parents of a list; null: implicit lists
  const uint32_t* selected = nullptr;  // [B, lists, H_kv, mask_words]; null at the bottom
  int64_t mask_words = 0;
  // Queries that share a row of `selected`: gather.stride or, of runs, the selection stride.
  int mask_stride = 1;
  int group_shift = 0;  // log2 G, a power of two, where they differ
  // Queries that the first run lacks at its begin, for it begins at a multiple of its length.
  int lead = 0;
  float scale = 0.f;

  PerListQueryGradient query;
  PerListRun run;
};
template <typename T, int kDim>
cudaError_t launch_per_list_gradient(const PerListGradientParams& params, cudaStream_t stream);

// Adds the partial sums of the same tasks, a whole number of lists, to the sums of dK and dV.
struct PartialSumParams {
  PerListGradientParams tasks;
  const uint32_t* entries = nullptr;  // of InverseParams; null: implicit lists
  const uint32_t* offsets = nullptr;
  float* keys = nullptr;    // [num_batches, H_kv, 16 num_parents, K]; null: not wanted
  float* values = nullptr;  // [num_batches, H_kv, 16 num_parents, V]
};
template <typename T, int kDim>
cudaError_t launch_partial_sums(const PartialSumParams& params, cudaStream_t stream);

}  // namespace htree::tree_attention
