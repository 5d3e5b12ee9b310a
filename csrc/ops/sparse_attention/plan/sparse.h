// How sparse_attention runs on CUDA: on the general kernels or on tensor cores, in which chunks of queries and in how much
// memory. Pure functions of the sizes, testable without a GPU. No CUDA and no torch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "ops/sparse_attention/plan/lists.h"
#include "ops/sparse_attention/plan/masked_rows.h"
#include "ops/tree/plan/workspace.h"

namespace htree::tree_attention {

struct SparseProblem {
  int64_t batch = 1, num_queries = 1, num_keys = 1;
  int64_t num_kv_heads = 1, group = 1;
  int64_t value_dim = 1;
  int64_t list_width = 1;  // n of the caller's lists
  int64_t block_size = 16;
  int64_t stride = 1;

  int64_t num_blocks() const { return ceil_div(num_keys, block_size); }
  // Entries of a list as the kernels read it: every visible block once, and one that says that the diagonal block is none
  // of them.
  int64_t visible_width() const { return std::min(list_width, num_blocks()) + 1; }
  int64_t list_rows(int64_t queries) const { return ceil_div(queries, stride); }
};

// Whole batches with all of their queries, or a range of the queries of one, a multiple of the stride.
struct SparseChunks {
  int64_t batches = 1, queries = 1;
};

// The most scratch of a chunk, unless one list needs more.
constexpr int64_t kSparseScratchBytes = int64_t{512} << 20;

// Chunks whose lists take `list_bytes` each, and `batch_bytes` beside them for every batch in the chunk.
inline SparseChunks sparse_chunks(const SparseProblem& p, int64_t list_bytes, int64_t batch_bytes) {
  const int64_t per_batch = p.list_rows(p.num_queries) * list_bytes + batch_bytes;
  SparseChunks chunks;
  // Batch and K/V head together are the y dimension of a grid.
  constexpr int64_t kMostPairs = 65535;
  const int64_t most = std::clamp<int64_t>(kMostPairs / p.num_kv_heads, 1, p.batch);
  if (per_batch <= kSparseScratchBytes) {
    chunks.queries = p.num_queries;
    chunks.batches = std::clamp<int64_t>(kSparseScratchBytes / std::max<int64_t>(1, per_batch), 1, most);
    return chunks;
  }
  const int64_t lists = std::max<int64_t>(1, (kSparseScratchBytes - batch_bytes) / list_bytes);
  chunks.queries = std::min(p.num_queries, lists * p.stride);
  return chunks;
}

// The forward keeps the scores of a chunk and its states.
inline SparseChunks sparse_forward_chunks(const SparseProblem& p) {
  const int64_t width = p.visible_width(), heads = p.num_kv_heads * p.group;
  const int64_t query = heads * (width * p.block_size + p.value_dim + 2) * 4;
  return sparse_chunks(p, p.stride * query + p.num_kv_heads * width * 4, 0);
}

// The backward keeps the lists of a chunk and their inverse: entries, and counters for each run of lists and block.
inline SparseChunks sparse_backward_chunks(const SparseProblem& p) {
  const int64_t counters = p.num_kv_heads * p.num_blocks() * 4;
  const int64_t list = p.num_kv_heads * (p.visible_width() * 8 + 4) + ceil_div(counters, kInvertedListRows);
  return sparse_chunks(p, list + p.stride * p.num_kv_heads * p.group * 4, 2 * counters);
}

// ---- tensor cores: fp16 or bf16, K = V of 32, 64 or 128, G up to 16, blocks of whole sixteens, n block_size up to 16 384
//
// The lists become lists of sixteens, and the call one over the tokens of a tree without rotations whose lists are given.
// Nothing of the choice follows from B, T or T_q, so that a row has the same bits in every call. Which rows before
// `masked_rows` multiply masked tiles, each row's own list says, see VisibleListParams; all others gather.

inline AttentionProblem list_problem(const SparseProblem& p, int64_t key_dim, bool half_dtype, double scale) {
  const int64_t parts = p.block_size / kTensorCoreRate;
  AttentionProblem problem;
  problem.batch = p.batch;
  problem.num_keys = p.num_keys;
  problem.num_queries = p.num_queries;
  problem.num_heads = p.num_kv_heads * p.group;
  problem.num_kv_heads = p.num_kv_heads;
  problem.key_dim = key_dim;
  problem.value_dim = p.value_dim;
  problem.half_dtype = half_dtype;
  problem.listed = true;
  problem.args.compression_rate = kTensorCoreRate;
  problem.args.max_top_nodes = std::max<int64_t>(1, p.num_keys);  // a single layer
  problem.args.top_k = std::min(p.list_width * parts, ceil_div(p.num_keys, kTensorCoreRate));
  problem.args.selection_stride = p.stride;
  problem.args.scale = scale;
  problem.args.rotate = false;
  problem.args.starts = {p.num_keys - p.num_queries};
  return problem;
}

struct SparseConfig : TreeConfig, GradientKernels {
  GatherKernel gather = GatherKernel::kPerQuery;
  int64_t num_sms = 1;
};

inline bool takes_tensor_cores(const SparseProblem& p, const AttentionProblem& problem,
                               const DeviceFacts& device) {
  return p.list_width > 0 && p.block_size % kTensorCoreRate == 0 &&
         p.list_width * p.block_size <= kMaxSelectWidth && p.stride <= kTensorCoreRate &&
         tensor_core_shape(problem) && device.major >= 8 &&
         device.shared_bytes >= tensor_core_shared_bytes(problem);
}

// Chunks whose lists take `list_bytes` each, and `batch_bytes` beside them for every batch in the chunk, in whole waves of
// `wave` queries where many fit.
inline void set_chunks(SparseConfig& config, const AttentionProblem& p, int64_t list_bytes,
                       int64_t batch_bytes, int64_t scratch, int64_t wave) {
  const int64_t stride = p.args.selection_stride, all = p.num_lists();
  const int64_t most = std::max<int64_t>(1, (scratch - batch_bytes) / list_bytes);
  int64_t lists = std::min(most, all);
  if (lists < all) {
    const int64_t block = std::max<int64_t>(1, wave / stride);
    lists -= lists > block ? lists % block : 0;
  }
  config.query_chunk = lists * stride;
  const int64_t batches = lists < all ? 1 : scratch / std::max<int64_t>(1, all * list_bytes + batch_bytes);
  config.batch_chunk =
      std::clamp<int64_t>(batches, 1, std::max<int64_t>(1, std::min(p.batch, 65535 / p.num_kv_heads)));
}

inline SparseConfig choose_sparse(const AttentionProblem& p, const DeviceFacts& device, GatherChoice choice) {
  SparseConfig config;
  static_cast<GradientKernels&>(config) = choose_gradients(p, device, choice);
  config.path = AttentionPath::kTensorCore;
  config.gather = choose_gather(p, device, choice);
  config.masked_rows = choose_masked_rows(p, device, choice);
  config.num_sms = device.num_sms;
  return config;
}

inline SparseConfig choose_sparse_forward(const AttentionProblem& p, const DeviceFacts& device,
                                          GatherChoice choice) {
  SparseConfig config = choose_sparse(p, device, choice);
  set_chunks(config, p, p.num_kv_heads * (p.args.top_k + 1) * 4 + mark_bytes_of_list(p, config),
             mark_bytes_of_batch(p, config), kSparseScratchBytes, kTensorCoreRate * device.num_sms);
  return config;
}

// The most memory of the partial sums of dK and dV, and of a chunk beside them.
constexpr int64_t kSparsePartialBytes = int64_t{1584} << 20;
constexpr int64_t kSparseGradientBytes = int64_t{768} << 20;

inline int64_t sparse_tasks_of_list(const AttentionProblem& p) {
  return ceil_div(p.args.selection_stride * p.group(), kGradientRows);
}

inline SparseConfig choose_sparse_backward(const AttentionProblem& p, const DeviceFacts& device,
                                           GatherChoice choice) {
  SparseConfig config = choose_sparse(p, device, choice);
  const int64_t stride = p.args.selection_stride;
  const MaskedGradientCost masked = masked_gradient_cost(p, config);
  const int64_t list = std::max(stride * p.num_kv_heads * gradient_record_bytes(p, config), masked.list) +
                       stride * p.num_kv_heads * 16 * p.group() +
                       p.num_kv_heads * (p.args.top_k * 8 + 32 +
                                         ceil_div(p.num_keys, kTensorCoreRate) * 4 / kInvertedListRows);
  const int64_t tasks = sparse_tasks_of_list(p) * p.num_kv_heads;
  set_chunks(config, p, list, masked.batch, kSparseGradientBytes,
             stride * (device.num_sms / std::gcd(device.num_sms, tasks)));
  return config;
}

struct SparseListMemory {
  int32_t *lists, *sizes;  // of a chunk
};
inline SparseListMemory lay_out_lists(Workspace& space, const AttentionProblem& p, const SparseConfig& c) {
  const int64_t lists = c.batch_chunk * ceil_div(c.query_chunk, p.args.selection_stride) * p.num_kv_heads;
  int32_t* entries = space.take<int32_t>(lists * p.args.top_k);
  return {entries, space.take<int32_t>(lists)};
}

struct SparseForwardMemory {
  SparseListMemory lists;
  TileMarkMemory marks;
};
inline SparseForwardMemory lay_out_sparse_forward(Workspace& space, const AttentionProblem& p,
                                                  const SparseConfig& c) {
  const SparseListMemory lists = lay_out_lists(space, p, c);
  return {lists, lay_out_tile_marks(space, p, c)};
}

struct SparseGradientMemory {
  SparseListMemory lists;
  KeyBound *node_bounds, *parent_bounds;  // of the call
  QueryBounds* query_bounds;              // of a chunk, as are all that follow
  KeyBound* list_bounds;
  TaskPowers* task_powers;
  char* records;  // of the rows that gather, and then MaskedGradientMemory
  RowMeta* meta;
  int32_t* counts;
  uint32_t *entries, *offsets, *run_counts;  // of InvertedListParams
  char* partials;
  int64_t partial_bytes;
};
inline SparseGradientMemory lay_out_sparse_gradients(Workspace& space, const AttentionProblem& p,
                                                     const SparseConfig& c) {
  const int64_t chunk_lists = ceil_div(c.query_chunk, p.args.selection_stride);
  const int64_t queries = c.batch_chunk * c.query_chunk, heads = c.batch_chunk * p.num_kv_heads;
  const int64_t lists = heads * chunk_lists, parents = p.parents(0);
  const int64_t nodes = p.batch * p.num_kv_heads * parents * kTensorCoreRate;
  SparseGradientMemory memory;
  memory.lists = lay_out_lists(space, p, c);
  memory.node_bounds = space.take<KeyBound>(nodes, kKeyBoundBytes);
  memory.parent_bounds = space.take<KeyBound>(nodes / kTensorCoreRate, kKeyBoundBytes);
  memory.query_bounds = space.take<QueryBounds>(heads, kQueryBoundsBytes);
  memory.list_bounds = space.take<KeyBound>(lists, kKeyBoundBytes);
  memory.task_powers = space.take<TaskPowers>(lists * sparse_tasks_of_list(p), kTaskPowersBytes);
  memory.records = space.take<char>(
      std::max(queries * p.num_kv_heads * gradient_record_bytes(p, c), masked_gradient_bytes(p, c)));
  memory.meta = space.take<RowMeta>(queries * p.num_heads, kRowMetaBytes);
  memory.counts = space.take<int32_t>(lists);
  memory.entries = space.take<uint32_t>(lists * p.args.top_k);
  memory.offsets = space.take<uint32_t>(heads * (parents + 1));
  memory.run_counts = space.take<uint32_t>(heads * ceil_div(chunk_lists, kInvertedListRows) * parents);
  const int64_t list_sums =
      sparse_tasks_of_list(p) * p.args.top_k * partial_sum_bytes(p.key_dim, p.value_dim);
  memory.partial_bytes =
      c.per_list ? std::min(lists, std::max<int64_t>(1, kSparsePartialBytes / list_sums)) * list_sums : 0;
  memory.partials = space.take<char>(memory.partial_bytes);
  return memory;
}

}  // namespace htree::tree_attention
