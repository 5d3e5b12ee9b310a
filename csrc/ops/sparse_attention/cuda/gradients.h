// Parameters and launchers of the gradients on tensor cores, docs/semantics/tree_attention.md §1.10: r = 16,
// fp16 or bf16 inputs, K = V in {32, 64, 128}. Each kernel is defined in the folder of its method. No torch.
//
// No sum uses atomics. dQ of a query belongs to one warp, or with per-list kernels to one thread
// block. dK and dV of a parent's children are added by one warp or block, in the order of its inverted list.
#pragma once

#include "ops/tree/cuda/copies.h"
#include "ops/tree/cuda/launch_params.h"

namespace htree::tree_attention {

// The numbers of a query head, computed once per chunk. Beside them its record holds K fp16 elements of the
// query, times a power of two, and V elements of dO.
struct RowMeta {
  float log_sum;        // log2 of the sum of e^score over the cut
  float delta;          // row_delta()
  float unscale;        // undoes the power of two of the query
  float gradient_norm;  // norm of the row of dO
};

// How large some rows of keys and of values are, as the exponent fields of floats that are not negative; rows of zeros
// have 0. From them follow the powers of two that keep the gradients of scores in fp16's range.
struct KeyBound {
  uint8_t value;    // of the largest norm of a row of V
  uint8_t unscale;  // of the largest number that undoes the power of two of a key row
};
// The bounds of a layer, for each (batch, kv head).
struct LayerBounds {
  KeyBound* nodes = nullptr;    // [16 num_parents]: the children of a node's parent up to the node itself
  KeyBound* parents = nullptr;  // [num_parents]: all children
  KeyBound* earlier = nullptr;  // [num_parents]: all parents before; filled by launch_earlier_bounds()
};

// The same for the query heads of a (batch, kv head): the largest, as the bits of floats that are not negative.
struct QueryBounds {
  unsigned gradient_norm;
  unsigned query_unscale;
  unsigned delta;
};

// The powers of two of a task of backward/per_list/.
struct TaskPowers {
  float key;             // brings the keys of its list into fp16's range
  float score_gradient;  // keeps dS below 2^14
};

struct RowParams {
  TensorView queries;    // [B, T_q, H, K]; the three views start at the chunk's first query
  TensorView gradients;  // dO [B, T_q, H, V]
  TensorView outputs;    // O [B, T_q, H, V]
  RowStates states;
  char* records = nullptr;        // [B, H_kv, num_queries]; null: not wanted
  int tile_rows = 0;              // of a tiled record, see tiled_record_rows(); 0: G rows of 2 (K + V) bytes
  RowMeta* meta = nullptr;        // [B, H_kv, num_queries, G]
  QueryBounds* bounds = nullptr;  // [B, H_kv], zeroed by the caller
  int num_batches = 0;
  int num_queries = 0;
  int num_kv_heads = 0;
  int group = 0;
  int64_t masked_end =
      0;  // some rows before this token are masked ones, by the lists of `gather`, and are left out
  GatherParams gather;
};
template <typename T, int kDim>
cudaError_t launch_gradient_rows(const RowParams& params, cudaStream_t stream);

// Fills `nodes` and `parents` of `bounds`. Of `pack` only the views and sizes are used.
template <typename T, int kDim>
cudaError_t launch_key_bounds(const PackParams& pack, const LayerBounds& bounds, cudaStream_t stream);

// ---- bounds of what a list multiplies, list_bounds.cu

// Fills `earlier` of a layer for the first num_parents parents of each head; a head has `head_parents`.
struct EarlierBoundParams {
  LayerBounds bounds;
  int64_t num_parents = 0;
  int64_t head_parents = 0;
  int num_heads = 0;  // B * H_kv
};
cudaError_t launch_earlier_bounds(const EarlierBoundParams& params, cudaStream_t stream);

// One layer of a chunk of queries. A list counts with all of its parents but its queries' own, of which it has the children
// up to the node of the last of them, and above the bottom without that node, which is always selected. So no later token
// changes what a list multiplies, nor what it is multiplied by.
struct ListBoundParams {
  GatherParams gather;        // null lists: parents 0, 1, ... up to the own
  int lead = 0;               // as in PerListGradientParams
  bool refines_own = true;    // above the bottom
  LayerBounds bounds;         // `earlier` is read for null lists alone
  KeyBound* lists = nullptr;  // [B, H_kv, num_lists]; null: not wanted
  // Where backward/per_list/ computes the layer: the powers of its tasks, [B, H_kv, num_lists, tasks of a list].
  TaskPowers* powers = nullptr;
  int tasks = 1;                  // of a list, kGradientRows rows each
  const RowMeta* meta = nullptr;  // [B, H_kv, num_queries, G]
};
cudaError_t launch_list_bounds(const ListBoundParams& params, cudaStream_t stream);

// What per_query/, shared_gather/ and per_parent/ share.
struct GradientParams {
  GatherParams gather;  // the queries come from the records instead
  const char* records = nullptr;
  int tile_rows = 0;  // as of RowParams
  const RowMeta* meta = nullptr;
  const KeyBound* list_bounds = nullptr;    // [B, H_kv, num_lists]
  const KeyBound* parent_bounds = nullptr;  // [B, H_kv, num_parents]
  const QueryBounds* query_bounds = nullptr;
  const uint32_t* selected = nullptr;  // null at the bottom
  int64_t mask_words = 0;
  float scale = 0.f;
};

// ---- dQ, where each query gathers for itself: sm_80 and later

struct QueryGradientParams {
  GradientParams common;
  bool first = false;
  bool last = false;
  float* partial = nullptr;    // [num_batches, num_queries, H, K] between layers
  void* gradient = nullptr;    // dQ [B, T_q, H, K]
  int64_t gradient_batch = 0;  // stride in elements
  int64_t masked_end = 0;      // as of AttendParams
};
template <typename T, int kDim>
cudaError_t launch_query_gradient(const QueryGradientParams& params, cudaStream_t stream);

// ---- dQ, where neighbouring queries share a gather: Hopper (sm_90a), G <= kMaxSharedGatherGroup

// `rotations`: table of list_width + 1 slots, RotationOrder::kFragments; null: nothing is rotated.
struct SharedGatherGradientParams {
  QueryGradientParams query;
  const __half2* rotations = nullptr;
};
template <typename T, int kDim>
cudaError_t launch_shared_gather_gradient(const SharedGatherGradientParams& params, cudaStream_t stream);

// ---- dK and dV with a warp or a block for every parent

struct KeyGradientParams {
  GradientParams common;
  const int32_t* counts = nullptr;    // [B, num_lists, H_kv]
  const uint32_t* entries = nullptr;  // as InvertedListParams::entries; null: the implicit lists of the top
  const uint32_t* offsets = nullptr;
  float* keys = nullptr;    // [num_batches, H_kv, 16 num_parents, K]; null: not wanted
  float* values = nullptr;  // [num_batches, H_kv, 16 num_parents, V]
  bool add = false;         // adds to what is there, else replaces it
  // Read by launch_parent_gradient alone: a window of lists, and the fp16 rotations of every position,
  // null where nothing is rotated.
  uint32_t first_list = 0, end_list = 0;
  const __half2* rotations = nullptr;
};
template <typename T, int kDim>
cudaError_t launch_key_gradient(const KeyGradientParams& params, cudaStream_t stream);

// Bytes of a head's records that make a window: all parents of the head walk their inverted lists in it while it stays
// in the L2.
constexpr int64_t kParentWindowBytes = int64_t{16} << 20;
// dK and dV from tiled records and from the inverted lists in a window of lists. A parent has one warp, or four where
// lists are implicit.
template <typename T, int kDim>
cudaError_t launch_parent_gradient(const KeyGradientParams& params, cudaStream_t stream);

// ---- all gradients of the queries that share a list: Hopper (sm_90a), any G,
// docs/semantics/tree_attention.md §1.12
//
// One pass over the lists makes all five products of attention's backward while a parent's keys and values
// are in shared memory. dQ stays with its thread block. What the block adds to dK and dV of a parent
// leaves as one partial sum per (list, slot), and a second kernel adds the partial sums of a parent in the
// order of the lists.
//
// At the top lists are implicit: every query takes all parents up to its own. Neighbours under one parent can
// then share a task whatever the selection stride: a task has kGradientRun queries, each with its own mask.

// Where dQ of a layer goes. `first`: no layer came before, nothing is in `partial` yet.
struct PerListQueryGradient {
  bool first = false;
  bool last = false;
  float* partial = nullptr;    // [num_batches, num_queries, H, K] between layers
  void* gradient = nullptr;    // dQ [B, T_q, H, K]; null: not wanted
  int64_t gradient_batch = 0;  // stride in elements
};

// The tasks [first_task, first_task + num_tasks) of a launch, and the partial sums [num_tasks, slots] that
// they leave for dK and dV, or null where neither is wanted. A task with m parents writes its first m slots.
struct PerListRun {
  char* partials = nullptr;
  int64_t slots = 0;
  uint32_t first_task = 0;
  uint32_t num_tasks = 0;
};

// One layer of a chunk of queries. A task is a (batch * kv head, list, block of rows), the last fastest.
struct PerListGradientParams {
  GatherParams gather;
  const __half2* rotations = nullptr;  // table of list_width slots, RotationOrder::kDims; or null
  TensorView gradients;                // dO [B, T_q, H, V], from the first query of the chunk
  const RowMeta* meta = nullptr;       // [B, H_kv, num_queries, G]
  const TaskPowers* powers = nullptr;  // [B, H_kv, num_lists, tasks of a list]
  const QueryBounds* query_bounds = nullptr;
  const int32_t* counts = nullptr;     // [B, num_lists, H_kv]: parents in a list; null: implicit lists
  const uint32_t* selected = nullptr;  // [B, lists, H_kv, mask_words]; null at the bottom
  int64_t mask_words = 0;
  // Queries that share a row of `selected`: the selection stride, which in runs of the
  // top differs from gather.stride.
  int mask_stride = 1;  // log2 G, where the two strides differ; G is then a power of two
  int group_shift = 0;  // log2 G, a power of two, where they differ
  // A run begins at a multiple of its length; this many queries before the chunk's first are missing
  // from the first run.
  int lead = 0;
  float scale = 0.f;

  PerListQueryGradient query;
  PerListRun run;
};
template <typename T, int kDim>
cudaError_t launch_per_list_gradient(const PerListGradientParams& params, cudaStream_t stream);

// Adds the partial sums of the same tasks, which make up whole lists, to the running sums of dK and dV.
struct PartialSumParams {
  PerListGradientParams tasks;
  const uint32_t* entries = nullptr;  // as InvertedListParams::entries; null: implicit lists
  const uint32_t* offsets = nullptr;
  float* keys = nullptr;    // [num_batches, H_kv, 16 num_parents, K]; null: not wanted
  float* values = nullptr;  // [num_batches, H_kv, 16 num_parents, V]
};
template <typename T, int kDim>
cudaError_t launch_partial_sums(const PartialSumParams& params, cudaStream_t stream);

}  // namespace htree::tree_attention
