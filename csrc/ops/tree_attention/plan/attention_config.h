// Which kernels a call of tree attention on CUDA takes and in which chunks: a pure function of the problem,
// so that it can be printed, tested without a GPU and searched. No torch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <sstream>
#include <string>

#include "device/sizes.h"
#include "ops/tree_attention/plan/layout_sizes.h"
#include "ops/tree_attention/tree_args.h"

namespace htree::tree_attention {

struct AttentionProblem {
  int64_t batch = 0;
  int64_t num_keys = 0;     // T
  int64_t num_queries = 0;  // T_q
  int64_t num_heads = 0;
  int64_t num_kv_heads = 0;
  int64_t key_dim = 0;
  int64_t value_dim = 0;
  bool half_dtype = false;  // fp16 or bf16
  AttentionArgs args;

  int64_t group() const { return num_heads / num_kv_heads; }
  int64_t layers() const { return num_layers(num_keys, args.max_top_nodes, args.compression_rate); }
  int64_t num_lists() const { return ceil_div(num_queries, args.selection_stride); }
  int64_t t0() const { return num_keys - num_queries; }
};

enum class AttentionPath {
  kGeneral,  // staged kernels over chunks, every dtype and shape
  // r = 16, fp16 or bf16, K = V in {32, 64, 128}, G <= 16, k <= 1024: mma.sync from sm_80 on, wgmma too on
  // sm_90
  kTensorCore,
};

// How the tensor-core path takes the softmax over the gathered parents of a list.
enum class GatherKernel {
  kPerQuery,      // a warp per (query, kv head), each with a gather of its own: sm_80 and later
  kSharedGather,  // neighbouring queries share one gather: sm_90a
  kPerList,       // all queries of a list together on products of warpgroups: sm_90a
};

// Which of them a caller wants: the fastest that the GPU has, or the one that every GPU has.
enum class GatherChoice { kAuto, kPerQuery };

struct AttentionConfig {
  AttentionPath path = AttentionPath::kGeneral;
  GatherKernel gather = GatherKernel::kPerQuery;
  bool dense_top = false;  // the top layer as dense products of warpgroups (sm_90a), see dense_top/
  // Of the backward alone.
  bool per_list_top = false;           // gradients of the top by backward/per_list/, for whatever stride
  bool shared_gather_queries = false;  // dQ by backward/shared_gather/
  int64_t batch_chunk = 1;             // batches of a chunk
  int64_t query_chunk = 0;             // queries of a chunk, a multiple of the stride
  int64_t selection_chunk = 0;         // lists whose scores are in memory at a time
  int64_t top_chunk = 0;               // lists whose importances at a dense top are in memory at a time
  int64_t num_sms = 1;                 // launches of backward/per_list/ take whole waves
};

// Temporary memory of the forward beyond the output, stored parents and one packed copy of K and V, in
// bytes: states and scores of a chunk take at most kScratchBytes, and at most what the tree and the other
// memory that follows T leave of kForwardBytes; 10^9 bytes in all, a little of which the allocator rounds
// away. Where they leave less than kLeastScratchBytes (above a million tokens of 32 heads), chunks have that
// and no less.
constexpr int64_t kForwardBytes = 1'000'000'000 - (int64_t{16} << 20);
constexpr int64_t kScratchBytes = int64_t{896} << 20;
constexpr int64_t kLeastScratchBytes = int64_t{256} << 20;
// Scores of recomputed parents in the backward.
constexpr int64_t kScoreBytes = kScratchBytes / 2;
// Candidates of a list, at most, on the tensor-core path: the keys of a row are ranked in registers.
constexpr int64_t kMaxSelectWidth = 16384;

// What the choice needs to know of a GPU.
struct DeviceFacts {
  int major = 0;             // of the compute capability
  int64_t shared_bytes = 0;  // most dynamic shared memory of a block
  bool hopper = false;       // sm_90, and the library holds code made for it
  int64_t num_sms = 1;
};

inline bool hopper_kernels(const DeviceFacts& facts) {
  return facts.hopper && facts.shared_bytes >= device::kHopperSharedBytes;
}

// A block's time hardly depends on how many of its rows are used, so it takes lists of several queries.
// Below, sharing beats gathers per query at every length tried on an H200 (4096 ... 524288); and what a query
// computes must not depend on how many others are in the call, so length has no say.
constexpr int64_t kMinPerListStride = 4;

inline GatherKernel choose_gather(const AttentionProblem& p, const DeviceFacts& device, GatherChoice choice) {
  if (!hopper_kernels(device) || choice == GatherChoice::kPerQuery) {
    return GatherKernel::kPerQuery;
  }
  return p.args.selection_stride >= kMinPerListStride ? GatherKernel::kPerList : GatherKernel::kSharedGather;
}

// Largest block of the forward and the backward together: one predicate serves both, so that recomputed lists
// are the forward's. 128-wide heads need 112 KB, which consumer GPUs (99 KB) do not have.
inline int64_t tensor_core_shared_bytes(const AttentionProblem& p) {
  return p.key_dim == 128 ? 112 * 1024 : 64 * 1024;
}

inline bool tensor_core_shape(const AttentionProblem& p) {
  return p.half_dtype && p.args.compression_rate == 16 && p.key_dim == p.value_dim &&
         (p.key_dim == 32 || p.key_dim == 64 || p.key_dim == 128) && p.group() <= 16 &&
         p.args.top_k * 16 <= kMaxSelectWidth && p.num_kv_heads <= 65535 &&
         ceil_div(p.num_keys, 16) < (int64_t{1} << 27);
}

// Candidates of a list in the layer with `num_nodes` nodes, at most.
inline int64_t list_candidates(int64_t num_nodes, int64_t top_k, int64_t rate) {
  return std::min(top_k, ceil_div(num_nodes, rate)) * rate;
}

// Nodes of the top layer.
inline int64_t top_nodes(const AttentionProblem& p) {
  int64_t nodes = p.num_keys;
  for (int64_t layer = 1; layer < p.layers(); ++layer) {
    nodes = ceil_div(nodes, p.args.compression_rate);
  }
  return nodes;
}

// Floats of a row of importances at a dense top.
inline int64_t importance_width(int64_t num_nodes) {
  return ceil_div(num_nodes, kDenseTileNodes) * kDenseTileNodes;
}

constexpr int64_t kTopLists = 256;  // rows of a block at a dense top, a list being G of them

// A single layer has nothing to select: it is one softmax on the kernels of every other layer. A block
// numbers the importances of its rows with 32 bits.
inline bool dense_top_shape(const AttentionProblem& p) {
  const int64_t group = p.group();
  return tensor_core_shape(p) && p.layers() > 1 && (group & (group - 1)) == 0 &&
         p.num_kv_heads * importance_width(top_nodes(p)) * kTopLists < (int64_t{1} << 32);
}

constexpr int64_t kTensorCoreBlock = 16;  // queries that one block of the widest kernels takes together

// Size of the chunks that `total` is cut into: at most `most` each, about the same, multiples of `block` if
// they can be.
inline int64_t even_chunk(int64_t total, int64_t most, int64_t block) {
  if (total <= most) {
    return std::max<int64_t>(1, total);
  }
  const int64_t even = ceil_div(total, ceil_div(total, most));
  const int64_t whole = ceil_div(even, block) * block;
  return whole <= most ? whole : most >= block ? most / block * block : most;
}

// Memory of the tensor-core forward that follows T: the layers above the tokens with their packed copies,
// the scales of the packed keys, the log-sums, and the tables.
inline int64_t tensor_core_tree_bytes(const AttentionProblem& p, bool dense_top) {
  const int64_t heads = p.batch * p.num_kv_heads;
  int64_t nodes = p.num_keys;
  int64_t bytes = heads * nodes * 4 + p.batch * p.num_queries * p.num_heads * 8 +
                  (p.args.top_k * kTensorCoreRate + 1) * p.key_dim * 4;
  for (int64_t layer = 1; layer < p.layers(); ++layer) {
    nodes = ceil_div(nodes, kTensorCoreRate);
    bytes += heads * (nodes * (p.key_dim + p.value_dim) * 2 +
                      ceil_div(nodes, kTensorCoreRate) * packed_parent_bytes(p.key_dim, p.value_dim));
  }
  if (dense_top) {
    bytes +=
        heads * (ceil_div(nodes, kDenseTileNodes) *
                 (dense_tile_bytes(p.key_dim) + dense_tile_bytes(p.value_dim) + kDenseTileNodes * 4 + 4));
  }
  return bytes;
}

inline AttentionConfig choose_attention_config(const AttentionProblem& p, const DeviceFacts& device,
                                               GatherChoice gather = GatherChoice::kAuto) {
  AttentionConfig config;
  if (tensor_core_shape(p) && device.major >= 8 && device.shared_bytes >= tensor_core_shared_bytes(p)) {
    config.path = AttentionPath::kTensorCore;
    config.gather = choose_gather(p, device, gather);
    config.dense_top = hopper_kernels(device) && dense_top_shape(p);
  }
  const int64_t stride = p.args.selection_stride;
  // per list: running states of its queries, two lists and the mask of one
  const int64_t per_list = stride * p.num_heads * p.value_dim * 4 + p.num_kv_heads * (p.args.top_k * 10 + 64);
  const int64_t scratch = config.path == AttentionPath::kGeneral
                              ? kScratchBytes
                              : std::clamp(kForwardBytes - tensor_core_tree_bytes(p, config.dense_top),
                                           kLeastScratchBytes, kScratchBytes);
  const int64_t state_bytes = scratch / 2, score_bytes = scratch / 2;
  const int64_t lists = std::max<int64_t>(1, state_bytes / per_list);
  const int64_t heads = std::max<int64_t>(1, p.num_kv_heads);
  // The widest kernels take a run of 16 queries of a kv head per block and SM: chunks of whole waves of
  // those.
  const int64_t wave = kTensorCoreBlock * device.num_sms / std::gcd(device.num_sms, heads);
  const int64_t block = wave / stride <= lists ? wave : kTensorCoreBlock;
  const int64_t used = even_chunk(p.num_lists(), lists, std::max<int64_t>(1, block / stride));
  config.query_chunk = used * stride;
  config.batch_chunk =
      std::clamp<int64_t>(lists / used, 1, std::max<int64_t>(1, std::min(p.batch, 65535 / heads)));
  if (p.layers() > 1) {
    const int64_t widest =
        list_candidates(ceil_div(p.num_keys, p.args.compression_rate), p.args.top_k, p.args.compression_rate);
    const int64_t row = p.num_heads * (widest * 4 + ceil_div(widest, 1024) * 8);  // scores, and sums of runs
    config.batch_chunk = std::clamp<int64_t>(score_bytes / row, 1, config.batch_chunk);
    config.selection_chunk = std::clamp<int64_t>(score_bytes / (row * config.batch_chunk), 1, used);
    if (config.dense_top) {
      const int64_t references = config.batch_chunk * used * p.num_heads * 4;
      const int64_t importance_row = p.num_kv_heads * importance_width(top_nodes(p)) * 4;
      const int64_t most = (score_bytes - references) / (importance_row * config.batch_chunk);
      config.top_chunk = even_chunk(used, std::max<int64_t>(1, most), kTopLists / p.group());
    }
  }
  return config;
}

// Chunks of the backward: records and numbers of the queries, dQ between layers, masks, the inverse of one
// layer's lists and the lists of every layer. The last count whether they are stored or recomputed: the order
// of the fp32 sums, and so every bit, is the same either way. The same holds of the scores of recomputed
// lists (kScoreBytes), which lie where blocks leave their sums later, if there are blocks.
constexpr int64_t kBackwardScratchBytes = int64_t{1856} << 20;
// What blocks leave for dK and dV of their lists takes this much of it: three tasks per SM of an H200 at
// head dim 128 and k = 512. The more lists a launch has, the less often are the running sums of a parent read
// and written: with two tasks per SM they are a fifth of all bytes at 131072 tokens.
constexpr int64_t kPartialSumBytes = int64_t{1584} << 20;

// A block of gradients multiplies kGradientRows rows (query, head) of a list, used or not; below this many
// the kernels that take a warp per query do less work.
constexpr int64_t kMinPerListGradientRows = 32;
// The same at the top, where all lists hold the same parents and a block takes kGradientRun tokens.
constexpr int64_t kMinTopGradientRows = 64;
// dK and dV by parent_gradient.cuh: below so many heads, kernels that fill a tile with the rows of several
// users do less work; above there are two tiles.
constexpr int64_t kMinParentGroup = 4, kMaxParentGroup = 8;
// Query heads that the registers of a warp of backward/shared_gather/ hold beside their gradients.
constexpr int64_t kMaxSharedGatherGroup = 8;

// Where queries have lists of their own, what blocks leave at the top, which needs none: two tasks per SM.
constexpr int64_t kTopSumBytes = int64_t{1056} << 20;

// `gather` of the result is that of the gradients: kPerQuery, or kPerList, see backward/per_list/.
inline AttentionConfig choose_backward_config(const AttentionProblem& p, const DeviceFacts& device,
                                              GatherChoice gather = GatherChoice::kAuto) {
  AttentionConfig config = choose_attention_config(p, device, GatherChoice::kPerQuery);
  const int64_t stride = p.args.selection_stride;
  const bool by_list = config.path == AttentionPath::kTensorCore &&
                       choose_gather(p, device, gather) == GatherKernel::kPerList &&
                       stride * p.group() >= kMinPerListGradientRows;
  config.gather = by_list ? GatherKernel::kPerList : GatherKernel::kPerQuery;
  const int64_t group = p.group();
  config.per_list_top = config.path == AttentionPath::kTensorCore && gather == GatherChoice::kAuto &&
                        hopper_kernels(device) && stride < kGradientRun && (group & (group - 1)) == 0 &&
                        kGradientRun * group >= kMinTopGradientRows;
  config.shared_gather_queries = config.path == AttentionPath::kTensorCore && gather == GatherChoice::kAuto &&
                                 hopper_kernels(device) && !by_list && group <= kMaxSharedGatherGroup;
  // of a head; where few share a kv head, records are made for 8
  const int64_t record = by_list ? 0
                         : group >= kMinParentGroup && group <= kMaxParentGroup
                             ? ceil_div(tiled_record_bytes(p.key_dim, p.value_dim), group)
                             : 2 * (p.key_dim + p.value_dim);
  const int64_t scratch = kBackwardScratchBytes - (by_list               ? kPartialSumBytes
                                                   : config.per_list_top ? kTopSumBytes
                                                                         : kScoreBytes);
  const int64_t per_list =
      stride * p.num_heads * (record + 16 + 4 * p.key_dim) +
      p.num_kv_heads * (p.args.top_k * 4 * p.layers() + p.args.top_k * p.args.compression_rate / 8 +
                        ceil_div(p.num_keys, p.args.compression_rate) / 64 + 64);
  const int64_t lists = std::max<int64_t>(1, scratch / per_list);
  int64_t used = std::max<int64_t>(1, std::min(lists, p.num_lists()));
  config.num_sms = device.num_sms;
  if ((by_list || config.per_list_top) && used < p.num_lists()) {
    // whole waves of tasks of backward/per_list/
    const int64_t run = by_list ? stride : kGradientRun;
    const int64_t tasks = ceil_div(run * group, kGradientRows) * p.num_kv_heads;
    const int64_t wave = std::lcm(run * (device.num_sms / std::gcd(device.num_sms, tasks)), stride) / stride;
    used -= used > wave ? used % wave : 0;
  }
  config.query_chunk = used * stride;
  config.batch_chunk = std::clamp<int64_t>(lists / used, 1, config.batch_chunk);
  config.selection_chunk = std::min(config.selection_chunk, used);
  config.top_chunk = std::min(config.top_chunk, used);
  return config;
}

// The kernels that the forward runs at one layer, 0 being the tokens. Gathered layers share those that
// select.
enum class LayerKernel { kGeneral, kPerQuery, kSharedGather, kPerList, kDense };

inline LayerKernel layer_kernel(const AttentionConfig& config, int64_t layer, int64_t num_layers) {
  if (config.path == AttentionPath::kGeneral) {
    return LayerKernel::kGeneral;
  }
  if (config.dense_top && layer + 1 == num_layers) {
    return LayerKernel::kDense;
  }
  switch (config.gather) {
    case GatherKernel::kSharedGather:
      return LayerKernel::kSharedGather;
    case GatherKernel::kPerList:
      return LayerKernel::kPerList;
    case GatherKernel::kPerQuery:
      break;
  }
  return LayerKernel::kPerQuery;
}

inline std::string describe(const AttentionConfig& config) {
  std::ostringstream text;
  text << (config.path == AttentionPath::kTensorCore ? "tensor_core" : "general")
       << " batch_chunk=" << config.batch_chunk << " query_chunk=" << config.query_chunk
       << " selection_chunk=" << config.selection_chunk
       << " top=" << (config.dense_top ? "dense" : "gathered") << " top_chunk=" << config.top_chunk;
  return text.str();
}

// The kernels of the gradients, which are those of every layer.
inline std::string describe_gradients(const AttentionConfig& config) {
  return config.path == AttentionPath::kGeneral    ? "general"
         : config.gather == GatherKernel::kPerList ? "per_list"
         : config.shared_gather_queries            ? "shared_gather"
                                                   : "per_query";
}

// Those of the top.
inline std::string describe_top_gradients(const AttentionConfig& config) {
  return config.per_list_top ? "per_list" : describe_gradients(config);
}

// layer_kernel() of every layer of the forward, the top first.
inline std::string describe_layers(const AttentionConfig& config, int64_t num_layers) {
  constexpr const char* kNames[] = {"general", "per_query", "shared_gather", "per_list", "dense"};
  std::string text;
  for (int64_t layer = num_layers; layer-- > 0;) {
    text += kNames[static_cast<int>(layer_kernel(config, layer, num_layers))];
    text += layer > 0 ? "," : "";
  }
  return text;
}

}  // namespace htree::tree_attention
