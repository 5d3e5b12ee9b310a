// The forward of tree attention on CUDA: which kernels run, in which chunks and in how much memory. Pure
// functions, so that they can be printed, tested without a GPU and searched. No CUDA and no torch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "ops/selection/plan/score_memory.h"
#include "ops/sparse_attention/plan/lists.h"
#include "ops/sparse_attention/plan/masked_rows.h"

namespace htree::tree_attention {

struct ForwardConfig : TreeConfig {
  GatherKernel gather = GatherKernel::kPerQuery;
  bool lists_given = false;  // the lists of all layers are read, and nothing is selected
};

// The temporary memory of the forward, beyond the output, stored parents and one packed copy of K and V,
// stays below 10^9 bytes, 16 MiB of which are left to the rounding of the allocator. States and scores of a
// chunk take what the tree and other memory that grows with T leave of kForwardBytes, but at most
// kScratchBytes and at least kLeastScratchBytes. The latter matters above a million tokens of 32 heads.
constexpr int64_t kForwardBytes = 1'000'000'000 - (int64_t{16} << 20);
constexpr int64_t kScratchBytes = int64_t{896} << 20;
constexpr int64_t kLeastScratchBytes = int64_t{256} << 20;
// A row before max_top_nodes is a row of dense causal attention: up to top_k * r it opens every node, and beyond it has a
// tree of one layer (segments.h). The bound is a multiple of the stride, where a list of queries begins. It must not
// depend on the length of the sequence.
inline int64_t choose_dense_rows(const AttentionProblem& p, const DeviceFacts& device, GatherChoice choice) {
  if (!hopper_kernels(device) || choice == GatherChoice::kPerQuery) {
    return 0;
  }
  return p.args.max_top_nodes / p.args.selection_stride * p.args.selection_stride;
}

constexpr int64_t kTensorCoreBlock = 16;  // queries of one thread block of the widest kernels

// The size of the chunks of `total`: about equal, at most `most`, and multiples of `block` if possible.
inline int64_t even_chunk(int64_t total, int64_t most, int64_t block) {
  if (total <= most) {
    return std::max<int64_t>(1, total);
  }
  if (most < block) {
    return most;
  }
  for (int64_t chunks = ceil_div(total, most);; ++chunks) {
    const int64_t whole = ceil_div(ceil_div(total, chunks), block) * block;
    if (whole <= most) {
      return whole;
    }
  }
}

// The memory of the tensor-core forward that grows with T: the layers above the tokens with their packed
// copies, the scales of the packed keys, the log-sums, the tables, and what the tiles of the dense and the masked rows take
// beyond one packed copy of the tokens.
inline int64_t tensor_core_tree_bytes(const AttentionProblem& p, const TreeConfig& config) {
  const int64_t heads = p.batch * p.num_kv_heads;
  int64_t nodes = p.num_keys;
  int64_t bytes = heads * nodes * 4 + p.batch * p.num_queries * p.num_heads * 8 +
                  (list_capacity(p) * kTensorCoreRate + 1) * p.key_dim * 4;
  for (int64_t layer = 1; layer < p.layers(); ++layer) {
    nodes = ceil_div(nodes, kTensorCoreRate);
    bytes += heads * (nodes * (p.key_dim + p.value_dim) * 2 +
                      ceil_div(nodes, kTensorCoreRate) * packed_parent_bytes(p.key_dim, p.value_dim));
  }
  if (config.dense_top) {
    bytes += dense_layer_bytes(p, nodes);
  }
  const int64_t tiles = dense_layer_bytes(p, tiled_tokens(p, config));
  if (config.masked_rows > 0) {
    bytes += std::max<int64_t>(0, tiles - packed_layer_bytes(p, 0));
  } else if (walks(p, config)) {
    bytes += tiles;
  }
  return bytes;
}

inline ForwardConfig choose_forward_config(const AttentionProblem& p, const DeviceFacts& device,
                                           GatherChoice gather = GatherChoice::kAuto) {
  ForwardConfig config;
  if (tensor_core_shape(p) && device.major >= 8 && device.shared_bytes >= tensor_core_shared_bytes(p)) {
    config.path = AttentionPath::kTensorCore;
    config.gather = choose_gather(p, device, gather);
    config.dense_rows = choose_dense_rows(p, device, gather);
    config.masked_rows = choose_masked_rows(p, device, gather);
    config.fragment_rotations =
        config.gather == GatherKernel::kSharedGather && walks(p, config) && p.args.rotate;
    config.dim_rotations = config.gather == GatherKernel::kPerList && walks(p, config) && p.args.rotate;
    config.dense_top = hopper_kernels(device) && dense_top_shape(p) && walks(p, config);
  }
  const int64_t stride = p.args.selection_stride;
  // Bytes of a list: the running states of its queries, two lists, and the mask of one, and its marks.
  const int64_t per_list = stride * p.num_heads * p.value_dim * 4 +
                           p.num_kv_heads * (list_capacity(p) * 10 + 64) + mark_bytes_of_list(p, config);
  const int64_t scratch =
      config.path == AttentionPath::kGeneral
          ? kScratchBytes
          : std::clamp(kForwardBytes - tensor_core_tree_bytes(p, config), kLeastScratchBytes, kScratchBytes);
  const int64_t state_bytes = scratch / 2, score_bytes = scratch / 2;
  const int64_t lists = std::max<int64_t>(1, state_bytes / per_list);
  const int64_t heads = std::max<int64_t>(1, p.num_kv_heads);
  // In the widest kernels a thread block takes 16 queries of a kv head and fills an SM, so chunks are whole
  // waves of such blocks.
  const int64_t wave = kTensorCoreBlock * device.num_sms / std::gcd(device.num_sms, heads);
  int64_t block = std::max<int64_t>(1, (wave / stride <= lists ? wave : kTensorCoreBlock) / stride);
  if (config.dense_top && !dense_span_shape(p)) {
    // The same for the blocks that score a dense top, if such a chunk fits.
    const int64_t scored = kTopLists / p.group() * device.num_sms / std::gcd(device.num_sms, heads);
    block = std::lcm(block, scored) <= lists ? std::lcm(block, scored) : block;
  }
  const int64_t used = even_chunk(ceil_div(walking_queries(p, config), stride), lists, block);
  config.query_chunk = used * stride;
  // A chunk of several batches has all of their queries, which are neighbours in memory.
  const int64_t most_batches = p.pieces().size() == 1 ? std::min(p.batch, 65535 / heads) : 1;
  config.batch_chunk = std::clamp<int64_t>(lists / used, 1, std::max<int64_t>(1, most_batches));
  if (p.layers() > 1) {
    const int64_t widest =
        std::max(most_parents(p, 1), most_parents(p, p.layers() - 1)) * p.args.compression_rate;
    const int64_t row = p.num_heads * (widest * 4 + ceil_div(widest, 1024) * 8);  // scores and sums of runs
    config.batch_chunk = std::clamp<int64_t>(score_bytes / row, 1, config.batch_chunk);
    config.selection_chunk = std::clamp<int64_t>(score_bytes / (row * config.batch_chunk), 1, used);
    if (config.dense_top && dense_span_shape(p)) {
      const int64_t list = span_score_bytes(p, p.num_heads);
      config.batch_chunk = std::clamp<int64_t>(score_bytes / list, 1, config.batch_chunk);
      config.top_chunk = even_chunk(used, std::max<int64_t>(1, score_bytes / (list * config.batch_chunk)),
                                    kTopLists / p.group());
    } else if (config.dense_top) {
      const int64_t references = config.batch_chunk * used * p.num_heads * 4;
      const int64_t importance_row = p.num_kv_heads * importance_width(top_nodes(p)) * 4;
      const int64_t most = (score_bytes - references) / (importance_row * config.batch_chunk);
      config.top_chunk = even_chunk(used, std::max<int64_t>(1, most), kTopLists / p.group());
    }
  }
  return config;
}

// The kernel that computes the softmax of a layer, 0 being the tokens, for rows that walk the tree; `masked` rows stand
// before config.masked_rows. The kernels that select are the same for all gathered layers.
enum class LayerKernel { kGeneral, kPerQuery, kSharedGather, kPerList, kDense, kMaskedRows };

inline LayerKernel layer_kernel(const ForwardConfig& config, int64_t layer, int64_t num_layers, bool masked) {
  if (config.path == AttentionPath::kGeneral) {
    return LayerKernel::kGeneral;
  }
  if (masked && layer == 0) {
    return LayerKernel::kMaskedRows;
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

// Whether forward/per_list/ takes a top whose implied lists have more entries than others.
inline bool long_top_lists(const AttentionProblem& p, const ForwardConfig& c) {
  return c.gather == GatherKernel::kPerList && !c.dense_top && list_capacity(p) > p.args.top_k;
}

// ---- memory of a chunk

struct ForwardMemory {
  float* partial;     // states between layers
  int32_t* lists[2];  // of a layer, and of the layer below
  uint32_t* mask;
  float* scores;  // selection_bytes()
  TileMarkMemory marks;
  int32_t* counts;  // of the parents of a layer's lists, where lists are given or long_top_lists()
};
inline ForwardMemory lay_out_forward(Workspace& space, const AttentionProblem& p, const ForwardConfig& c) {
  const int64_t lists = c.batch_chunk * ceil_div(c.query_chunk, p.args.selection_stride) * p.num_kv_heads;
  const int64_t many = p.layers() > 1 ? 1 : 0;  // a single layer needs no states and no lists
  ForwardMemory memory;
  memory.partial = space.take<float>(many * c.batch_chunk * c.query_chunk * p.num_heads * p.value_dim);
  memory.lists[0] = space.take<int32_t>(many * lists * p.args.top_k);
  memory.lists[1] = space.take<int32_t>(many * lists * p.args.top_k);
  memory.mask = space.take<uint32_t>(many * lists * mask_words(p));
  memory.scores = space.take<float>(selection_bytes(p, c), 1);
  memory.marks = lay_out_tile_marks(space, p, c);
  memory.counts = space.take<int32_t>(c.lists_given || long_top_lists(p, c) ? many * lists : 0);
  return memory;
}

}  // namespace htree::tree_attention
