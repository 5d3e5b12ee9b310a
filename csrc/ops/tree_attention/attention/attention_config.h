// Which kernels a call of tree attention on CUDA takes and in which chunks: a pure function of the problem,
// so that it can be printed, tested without a GPU and searched. No torch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <sstream>
#include <string>

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
  kGeneral,     // staged kernels over chunks, every dtype and shape
  kTensorCore,  // r = 16, fp16 or bf16, K = V in {32, 64, 128}, G <= 16: mma.sync, sm_80 and later
};

// How the tensor-core path takes the softmax over the gathered parents of a list.
enum class GatherKernel {
  kQuery,  // a warp per (query, kv head), each with a gather of its own: sm_80 and later
  kBlock,  // all queries of a list together on products of warpgroups: sm_90a, see block/
};

struct AttentionConfig {
  AttentionPath path = AttentionPath::kGeneral;
  GatherKernel gather = GatherKernel::kQuery;
  GatherKernel gradients = GatherKernel::kQuery;  // of the backward
  int64_t batch_chunk = 1;                        // batches of a chunk
  int64_t query_chunk = 0;                        // queries of a chunk, a multiple of the stride
  int64_t selection_chunk = 0;                    // lists whose scores are in memory at a time
};

// Temporary memory of the forward beyond outputs, stored parents, the tree and the re-laid copy of K and V.
constexpr int64_t kStateScratchBytes = int64_t{448} << 20;
constexpr int64_t kForwardScoreBytes = int64_t{448} << 20;
// Candidates of a list, at most, on the tensor-core path: the keys of a row are ranked in shared memory.
constexpr int64_t kMaxSelectWidth = 16384;

// What the choice needs to know of a GPU.
struct DeviceFacts {
  int major = 0;             // of the compute capability
  int64_t shared_bytes = 0;  // most dynamic shared memory of a block
  bool hopper = false;       // sm_90, and the library holds code made for it
};

// Dynamic shared memory of the kernels that fill an SM of sm_90.
constexpr int64_t kHopperSharedBytes = 232448;
// A block's time hardly depends on how many of its rows are used, so it takes lists of several queries.
constexpr int64_t kMinBlockStride = 4;

// A block of gradients multiplies 128 rows (query, head) of a list, used or not; with fewer than these the
// kernels that take a warp per query are faster.
constexpr int64_t kMinGradientBlockRows = 32;

// Largest block of the forward and the backward together: one predicate serves both, so that recomputed lists
// are the forward's. 128-wide heads need 112 KB, which consumer GPUs (99 KB) do not have.
inline int64_t tensor_core_shared_bytes(const AttentionProblem& p) {
  const int64_t gradients = p.key_dim == 128 ? 112 * 1024 : 64 * 1024;
  const int64_t selection = p.args.top_k * 16 * 4 + p.args.top_k * 4 + 16 * 1024;
  return std::max(gradients, selection);
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

inline AttentionConfig choose_attention_config(const AttentionProblem& p, const DeviceFacts& device) {
  AttentionConfig config;
  config.path =
      tensor_core_shape(p) && device.major >= 8 && device.shared_bytes >= tensor_core_shared_bytes(p)
          ? AttentionPath::kTensorCore
          : AttentionPath::kGeneral;
  const int64_t stride = p.args.selection_stride;
  if (config.path == AttentionPath::kTensorCore && device.hopper && stride >= kMinBlockStride &&
      device.shared_bytes >= kHopperSharedBytes) {
    config.gather = GatherKernel::kBlock;
  }
  // per list: running states of its queries, two lists and the mask of one
  const int64_t per_list = stride * p.num_heads * p.value_dim * 4 + p.num_kv_heads * (p.args.top_k * 10 + 64);
  const int64_t lists = std::max<int64_t>(1, kStateScratchBytes / per_list);
  const int64_t used = std::max<int64_t>(1, std::min(lists, p.num_lists()));
  config.query_chunk = used * stride;
  const int64_t heads = std::max<int64_t>(1, p.num_kv_heads);
  config.batch_chunk =
      std::clamp<int64_t>(lists / used, 1, std::max<int64_t>(1, std::min(p.batch, 65535 / heads)));
  if (p.layers() > 1) {
    const int64_t widest =
        list_candidates(ceil_div(p.num_keys, p.args.compression_rate), p.args.top_k, p.args.compression_rate);
    const int64_t row = p.num_heads * widest * 4;
    config.batch_chunk = std::clamp<int64_t>(kForwardScoreBytes / row, 1, config.batch_chunk);
    config.selection_chunk = std::clamp<int64_t>(kForwardScoreBytes / (row * config.batch_chunk), 1, used);
  }
  return config;
}

// Chunks of the backward: records and numbers of the queries, dQ between layers, masks, the inverse of one
// layer's lists and the lists of every layer. The last count whether they are stored or recomputed: the order
// of the fp32 sums, and so every bit, is the same either way. Scores of recomputed lists (kForwardScoreBytes)
// come on top.
constexpr int64_t kBackwardScratchBytes = int64_t{1408} << 20;
// What blocks leave for dK and dV of their lists takes this much of it: two tasks per SM of an H200 at
// head dim 128 and k = 512.
constexpr int64_t kPartialSumBytes = int64_t{1056} << 20;

inline AttentionConfig choose_backward_config(const AttentionProblem& p, const DeviceFacts& device) {
  AttentionConfig config = choose_attention_config(p, device);
  const int64_t stride = p.args.selection_stride;
  if (config.gather == GatherKernel::kBlock && stride * p.group() >= kMinGradientBlockRows) {
    config.gradients = GatherKernel::kBlock;
  }
  const bool blocks = config.gradients == GatherKernel::kBlock;
  const int64_t record = blocks ? 0 : 2 * (p.key_dim + p.value_dim);
  const int64_t scratch = kBackwardScratchBytes - (blocks ? kPartialSumBytes : 0);
  const int64_t per_list =
      stride * p.num_heads * (record + 16 + 4 * p.key_dim) +
      p.num_kv_heads * (p.args.top_k * 4 * p.layers() + p.args.top_k * p.args.compression_rate / 8 +
                        ceil_div(p.num_keys, p.args.compression_rate) / 64 + 64);
  const int64_t lists = std::max<int64_t>(1, scratch / per_list);
  const int64_t used = std::max<int64_t>(1, std::min(lists, p.num_lists()));
  config.query_chunk = used * stride;
  config.batch_chunk = std::clamp<int64_t>(lists / used, 1, config.batch_chunk);
  config.selection_chunk = std::min(config.selection_chunk, used);
  return config;
}

inline std::string describe(const AttentionConfig& config) {
  std::ostringstream text;
  text << (config.path == AttentionPath::kTensorCore ? "tensor_core" : "general")
       << " batch_chunk=" << config.batch_chunk << " query_chunk=" << config.query_chunk
       << " selection_chunk=" << config.selection_chunk
       << " gather=" << (config.gather == GatherKernel::kBlock ? "block" : "query")
       << " gradients=" << (config.gradients == GatherKernel::kBlock ? "block" : "query");
  return text.str();
}

}  // namespace htree::tree_attention
