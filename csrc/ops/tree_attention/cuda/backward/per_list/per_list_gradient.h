// Launchers of the gradients of whole selection blocks on Hopper (sm_90a): r = 16, fp16 or bf16 inputs,
// K = V in {32, 64, 128}, any G, docs/semantics/tree_attention.md §1.10, §1.12. No torch.
//
// Without lists every query takes all parents up to its own, so that neighbours under one parent can share a
// task whatever the selection stride: kGradientRun queries each, with a mask for every query.
//
// One pass over the lists makes all five products of attention's backward while a parent's keys and values
// are in shared memory. dQ stays with its block; what a block adds to dK and dV of a parent leaves as one
// partial sum per (list, slot), and a second kernel adds a parent's partials in the order of the lists.
#pragma once

#include "ops/tree_attention/cuda/backward/gradient_params.h"

namespace htree::tree_attention {

// Of dK' and dV of a parent's 16 children in bf16.
constexpr int64_t partial_sum_bytes(int64_t key_dim, int64_t value_dim) {
  return kTensorCoreRate * 2 * (key_dim + value_dim);
}

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
  int mask_stride =
      1;  // queries that share a row of `selected`: gather.stride or, of runs, the selection stride
  int group_shift = 0;  // log2 G, a power of two, where they differ
  int lead =
      0;  // of queries that the first run lacks at its begin, for it begins at a multiple of its length
  float scale = 0.f;

  bool first = false;  // layer: nothing in partial_queries yet
  bool last = false;
  float* partial_queries = nullptr;  // [num_batches, num_queries, H, K] between layers
  void* query_gradient = nullptr;    // dQ [B, T_q, H, K]; null: not wanted
  int64_t query_gradient_batch = 0;  // stride in elements

  // [num_tasks, partial_slots] partial sums of the tasks [first_task, first_task + num_tasks); null: dK and
  // dV are not wanted. A task with m parents writes its first m slots.
  char* partials = nullptr;
  int64_t partial_slots = 0;
  uint32_t first_task = 0;
  uint32_t num_tasks = 0;
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
