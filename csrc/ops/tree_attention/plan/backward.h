// The backward of tree attention on CUDA: which kernels run, in which chunks and in how much memory. Pure
// functions, so that they can be printed and tested without a GPU. No CUDA and no torch.
#pragma once

#include "ops/tree_attention/plan/forward.h"

namespace htree::tree_attention {

// The most memory for the scores of recomputed lists.
constexpr int64_t kScoreBytes = kScratchBytes / 2;
// The most scratch of a chunk of the backward: the queries' records and numbers, dQ between layers, masks,
// the inverse of one layer's lists, the lists of every layer, and either the partial sums or the scores of
// recomputed lists, which share their memory. Lists and scores are counted whether lists are stored or
// recomputed, so that the order of the fp32 sums, and with it every bit, is the same either way. A table of
// rotations, two counts per parent and two bytes per node for its bound, some MiB that do not depend on the chunk, come on
// top.
constexpr int64_t kBackwardScratchBytes = int64_t{1856} << 20;
// The part of it for partial sums of dK and dV, if all layers run the per-list kernels: three tasks per SM of
// an H200 at head dim 128 and k = 512. The more lists a launch has, the less often the running sums of a
// parent are read and written: with two tasks per SM that is a fifth of all bytes at 131072 tokens.
constexpr int64_t kPartialSumBytes = int64_t{1584} << 20;

// The same limit at the top, where all lists hold the same parents and a thread
// block takes kGradientRun tokens.
constexpr int64_t kMinTopGradientRows = 64;
// The part of the scratch for partial sums if only the top runs the per-list kernels: two tasks per SM.
constexpr int64_t kTopSumBytes = int64_t{1056} << 20;

// The most memory for the query side of dense rows, as long as one batch fits. It is in the memory of the partial sums.
constexpr int64_t kDenseGradientBytes = kScoreBytes;

struct BackwardConfig : TreeConfig, GradientKernels {
  int64_t dense_batches = 1;  // batches whose dense rows are laid out at the same time
  bool per_list_top =
      false;  // backward/per_list/ computes the top, for any stride, in runs of kGradientRun queries
  // Groups are computed as two K/V heads of half as many query heads, where lists are stored.
  bool halves = false;
  int64_t num_sms = 1;  // a wave of backward/per_list/ has so many thread blocks
};

// ---- the choice

// The entries of a chunk's lists are numbered in 32 bits.
constexpr int64_t kMostEntries = (int64_t{1} << 32) - 1;

inline BackwardConfig choose_backward_config(const AttentionProblem& p, const DeviceFacts& device,
                                             GatherChoice gather = GatherChoice::kAuto) {
  BackwardConfig config;
  static_cast<TreeConfig&>(config) = choose_forward_config(p, device, GatherChoice::kPerQuery);
  if (config.path == AttentionPath::kTensorCore) {
    config.dense_rows = choose_dense_rows(p, device, gather);
    config.masked_rows = choose_masked_rows(p, device, gather);
    config.dense_top = config.dense_top && walks(p, config);  // the forward's choice knew no dense rows
    const int64_t batch_bytes = std::max<int64_t>(1, dense_gradient_bytes(p, config, 1));
    config.dense_batches =
        std::clamp<int64_t>(kDenseGradientBytes / batch_bytes, 1, std::max<int64_t>(1, p.batch));
  }
  const int64_t stride = p.args.selection_stride;
  // The general kernels have the chunks of a GPU that is not Hopper.
  const bool tensor_cores = config.path == AttentionPath::kTensorCore;
  static_cast<GradientKernels&>(config) = choose_gradients(p, tensor_cores ? device : DeviceFacts{}, gather);
  const bool by_list = config.per_list;
  const int64_t group = p.group();
  config.per_list_top = tensor_cores && gather != GatherChoice::kPerQuery && hopper_kernels(device) &&
                        stride < kGradientRun && (group & (group - 1)) == 0 &&
                        kGradientRun * group >= kMinTopGradientRows;
  config.halves = tensor_cores && gather != GatherChoice::kPerQuery && hopper_kernels(device) &&
                  walks(p, config) && !by_list && group > kMaxSharedGatherGroup && group % 2 == 0;
  config.fragment_rotations = config.shared_gather_queries && walks(p, config) && p.args.rotate;
  config.dim_rotations = (by_list || config.per_list_top) && walks(p, config) && p.args.rotate;
  const int64_t record = ceil_div(gradient_record_bytes(p, config), group);  // of a head
  const int64_t shared = by_list ? kPartialSumBytes : config.per_list_top ? kTopSumBytes : kScoreBytes;
  const int64_t scratch =
      kBackwardScratchBytes - std::max(shared, dense_gradient_bytes(p, config, config.dense_batches));
  const int64_t per_list =
      stride * p.num_heads * (record + 16 + 4 * p.key_dim) +
      p.num_kv_heads * (p.args.top_k * 4 * p.layers() + (list_capacity(p) - p.args.top_k) * 8 +
                        list_capacity(p) * p.args.compression_rate / 8 +
                        ceil_div(p.num_keys, p.args.compression_rate) / 64 + 64);
  // The query side of masked rows shares the memory of the partial sums, so a chunk must fit beside either.
  const MaskedGradientCost masked = masked_gradient_cost(p, config);
  const int64_t masked_list = per_list + masked.list;
  const int64_t numbered = kMostEntries / std::max<int64_t>(1, list_capacity(p));
  const int64_t lists = std::max<int64_t>(
      1, std::min({scratch / per_list, (kBackwardScratchBytes - masked.batch) / masked_list, numbered}));
  const int64_t piece_lists = ceil_div(walking_queries(p, config), stride);
  int64_t used = std::max<int64_t>(1, std::min(lists, piece_lists));
  config.num_sms = device.num_sms;
  if ((by_list || config.per_list_top) && used < piece_lists) {
    // Chunks are whole waves of tasks of backward/per_list/.
    const int64_t run = by_list ? stride : kGradientRun;
    const int64_t tasks = ceil_div(run * group, kGradientRows) * p.num_kv_heads;
    const int64_t wave = std::lcm(run * (device.num_sms / std::gcd(device.num_sms, tasks)), stride) / stride;
    used -= used > wave ? used % wave : 0;
  }
  config.query_chunk = used * stride;
  const int64_t batches = std::min(lists / used, kBackwardScratchBytes / (used * masked_list + masked.batch));
  config.batch_chunk = std::clamp<int64_t>(batches, 1, config.batch_chunk);
  config.selection_chunk = std::min(config.selection_chunk, used);
  config.top_chunk = std::min(config.top_chunk, used);
  return config;
}

// ---- one layer, 0 being the tokens

// Whether backward/per_list/ computes the gradients of a layer, and whether it does so for
// runs of neighbouring queries.
inline bool layer_runs(const AttentionProblem& p, const BackwardConfig& c, int64_t layer) {
  return c.per_list_top && layer + 1 == p.layers();
}
inline bool layer_per_list(const AttentionProblem& p, const BackwardConfig& c, int64_t layer) {
  return c.per_list || layer_runs(p, c, layer);
}
// The tasks, of kGradientRows rows each, of a list or run.
inline int64_t tasks_of_list(const AttentionProblem& p, const BackwardConfig& c, int64_t layer) {
  const int64_t queries = layer_runs(p, c, layer) ? kGradientRun : p.args.selection_stride;
  return ceil_div(queries * p.group(), kGradientRows);
}
// The most partial sums of a task. At the top every parent may have one.
inline int64_t partial_slots(const AttentionProblem& p, int64_t layer) {
  return layer + 1 == p.layers() ? p.parents(layer) : p.args.top_k;
}

// The first row of a layer in the fp32 sums of dK or dV, which are [B, H_kv, 16 * parents] for one layer
// after another. For p.layers() this is the number of all rows.
inline int64_t gradient_sum_row(const AttentionProblem& p, int64_t layer) {
  int64_t rows = 0;
  for (int64_t i = 0; i < layer; ++i) {
    rows += p.batch * p.num_kv_heads * p.parents(i) * kTensorCoreRate;
  }
  return rows;
}

// ---- memory

struct BackwardMemory {
  KeyBound *node_bounds, *parent_bounds, *earlier_bounds;  // of LayerBounds, one layer after another
  QueryBounds* query_bounds;                               // of a chunk, as are all that follow
  KeyBound* list_bounds;
  TaskPowers* task_powers;
  char* records;
  RowMeta* meta;
  float* query_sums;    // dQ between layers
  int32_t* lists;       // lists of all layers below the top, if recomputed; list_stride apart
  int64_t list_stride;  // in elements
  uint32_t* mask;
  int32_t* counts;
  uint32_t *entries, *offsets, *run_counts;  // of InvertedListParams
  void* rotations;                           // of every position, in fp16
  char* partials;  // the partial sums, or the query side of dense rows, or MaskedGradientMemory
  int64_t partial_bytes;
  float* scores;  // in the memory of the partial sums: lists are selected before the first sum
};

// The bytes of the partial sums of the layer that needs most.
inline int64_t partial_bytes(const AttentionProblem& p, const BackwardConfig& c) {
  const int64_t lists = c.batch_chunk * ceil_div(c.query_chunk, p.args.selection_stride) * p.num_kv_heads;
  const int64_t runs = (c.query_chunk / kGradientRun + 2) * c.batch_chunk * p.num_kv_heads;
  int64_t bytes = 0;
  for (int64_t layer = 0; layer < p.layers(); ++layer) {
    if (layer_per_list(p, c, layer)) {
      const int64_t list_sums =
          tasks_of_list(p, c, layer) * partial_slots(p, layer) * partial_sum_bytes(p.key_dim, p.value_dim);
      const int64_t budget = c.per_list ? kPartialSumBytes : kTopSumBytes;
      const int64_t most = std::max<int64_t>(1, budget / list_sums);
      bytes = std::max(bytes, std::min(most, layer_runs(p, c, layer) ? runs : lists) * list_sums);
    }
  }
  return bytes;
}

// The most tasks of backward/per_list/ that a layer of a chunk has.
inline int64_t chunk_tasks(const AttentionProblem& p, const BackwardConfig& c) {
  const int64_t heads = c.batch_chunk * p.num_kv_heads;
  const int64_t lists = ceil_div(c.query_chunk, p.args.selection_stride);
  const int64_t runs = c.query_chunk / kGradientRun + 2;
  int64_t tasks = 0;
  for (int64_t layer = 0; layer < p.layers(); ++layer) {
    if (layer_per_list(p, c, layer)) {
      tasks = std::max(tasks, heads * (layer_runs(p, c, layer) ? runs : lists) * tasks_of_list(p, c, layer));
    }
  }
  return tasks;
}

inline BackwardMemory lay_out_backward(Workspace& space, const AttentionProblem& p, const BackwardConfig& c,
                                       bool recompute) {
  const int64_t chunk_lists = ceil_div(c.query_chunk, p.args.selection_stride);
  const int64_t queries = c.batch_chunk * c.query_chunk;
  const int64_t rows = queries * p.num_heads;
  const int64_t lists = c.batch_chunk * chunk_lists * p.num_kv_heads;
  const int64_t many = p.layers() > 1 ? 1 : 0;
  const int64_t heads = many * c.batch_chunk * p.num_kv_heads;
  const int64_t records =
      layer_per_list(p, c, 0) ? 0 : queries * p.num_kv_heads * gradient_record_bytes(p, c);
  BackwardMemory memory;
  const int64_t all_nodes = gradient_sum_row(p, p.layers());
  memory.node_bounds = space.take<KeyBound>(all_nodes, kKeyBoundBytes);
  memory.parent_bounds = space.take<KeyBound>(all_nodes / kTensorCoreRate, kKeyBoundBytes);
  memory.earlier_bounds = space.take<KeyBound>(all_nodes / kTensorCoreRate, kKeyBoundBytes);
  memory.query_bounds = space.take<QueryBounds>(c.batch_chunk * p.num_kv_heads, kQueryBoundsBytes);
  memory.list_bounds = space.take<KeyBound>(lists, kKeyBoundBytes);
  memory.task_powers = space.take<TaskPowers>(chunk_tasks(p, c), kTaskPowersBytes);
  memory.records = space.take<char>(records);
  memory.meta = space.take<RowMeta>(rows, kRowMetaBytes);
  memory.query_sums = space.take<float>(many * rows * p.key_dim);
  memory.list_stride = ceil_div(lists * p.args.top_k, 64) * 64;
  memory.lists = space.take<int32_t>(recompute ? memory.list_stride * (p.layers() - 1) : 0);
  memory.mask = space.take<uint32_t>(many * lists * mask_words(p));
  memory.counts = space.take<int32_t>(lists);
  memory.entries = space.take<uint32_t>(many * lists * p.args.top_k);
  memory.offsets = space.take<uint32_t>(heads * (p.parents(0) + 1));
  memory.run_counts = space.take<uint32_t>(heads * ceil_div(chunk_lists, kInvertedListRows) * p.parents(0));
  memory.rotations =
      space.take<char>(c.parent_warps ? (list_capacity(p) * kTensorCoreRate + 1) * p.key_dim * 2 : 0);
  memory.partial_bytes = partial_bytes(p, c);
  memory.partials =
      space.take<char>(std::max({memory.partial_bytes, recompute ? selection_bytes(p, c) : 0,
                                 dense_gradient_bytes(p, c, c.dense_batches), masked_gradient_bytes(p, c)}));
  memory.scores = reinterpret_cast<float*>(memory.partials);
  return memory;
}

}  // namespace htree::tree_attention
