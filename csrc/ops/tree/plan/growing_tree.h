// The tree of a sequence that grows by chunks, while a tree cache takes a prompt: the capacity of the kernels' copies
// for the longest sequence, and what new tokens change in them. Pure functions. No CUDA and no torch.
//
// Every copy is cut into units, parents or tiles, that hold a number of neighbouring nodes of one layer. A unit is done
// when all of its nodes are finished; whatever comes later leaves it as it is. So tokens [begin, end) change, in each
// copy, the units from the first one that was not done at `begin`. What a unit holds of a node that is not finished is
// never read: the node is always the rightmost candidate, which is opened (docs/semantics/tree_cache.md §7).
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "ops/tree/plan/tree_config.h"
#include "ops/tree/plan/workspace.h"

namespace htree::tree_attention {

inline AttentionProblem with_tokens(AttentionProblem p, int64_t tokens) {
  p.num_keys = tokens;
  return p;
}

// The most tokens of a sequence whose top is `layer`.
inline int64_t most_tokens(const AttentionProblem& p, int64_t layer) {
  return p.args.max_top_nodes * node_span(kTensorCoreRate, layer);
}

// Which copies the kernels read of a sequence. `hopper` says whether the GPU has the kernels of a dense top.
inline bool tiles_top(const AttentionProblem& p, bool hopper) {
  return hopper && dense_top_shape(p);
}
inline bool tiles_top_spans(const AttentionProblem& p, bool hopper) {
  return tiles_top(p, hopper) && dense_span_shape(p);
}
inline bool packs_spans(const AttentionProblem& p, bool hopper, int64_t layer) {
  const bool top = layer + 1 == p.layers();
  return layer > 0 && span_rows(p, layer) > 1 && !(top && tiles_top_spans(p, hopper));
}

// The tiles of the span means of a top, see SpanTiling.
inline int64_t top_span_tiles(const AttentionProblem& p) {
  const SpanTiling tiling = span_tiling(span_rows(p, p.layers() - 1));
  return tiling.groups(top_nodes(p)) << tiling.tiles_log2;
}

// ---- capacity

// Units of each copy for one (sequence, K/V head).
struct TreeCapacity {
  std::vector<int64_t> parents;    // of each layer
  std::vector<int64_t> span_rows;  // span means of a node where they are packed, else 0
  int64_t top_tiles = 0;           // of whichever layer is the top
  int64_t top_span_tiles = 0;
};

// For every sequence of up to p.num_keys tokens. Of the sequences of one depth the longest one needs most, and if any
// of them has tiles of span means the shortest one has.
inline TreeCapacity tree_capacity(const AttentionProblem& p, bool hopper) {
  TreeCapacity capacity;
  for (int64_t layer = 0; layer < p.layers(); ++layer) {
    capacity.parents.push_back(p.parents(layer));
    capacity.span_rows.push_back(packs_spans(p, hopper, layer) ? span_rows(p, layer) : 0);
    if (layer == 0) {
      continue;
    }
    const AttentionProblem shortest = with_tokens(p, most_tokens(p, layer - 1) + 1);
    const AttentionProblem longest = with_tokens(p, std::min(p.num_keys, most_tokens(p, layer)));
    if (tiles_top(shortest, hopper)) {
      capacity.top_tiles = std::max(capacity.top_tiles, ceil_div(top_nodes(longest), kDenseTileNodes));
    }
    if (tiles_top_spans(shortest, hopper)) {
      capacity.top_span_tiles = std::max(capacity.top_span_tiles, top_span_tiles(longest));
    }
  }
  return capacity;
}

// The positions that keys and queries of a list are rotated to.
inline int64_t rope_positions(const AttentionProblem& p) {
  return p.args.top_k * kTensorCoreRate + 1;
}

// Where the copies of all sequences lie in one allocation, copy by copy. The tables depend on the options alone; those
// of both orders have their place, because HTREE_TREE_GATHER may choose another kernel for the next chunk.
struct GrowingMemory {
  double* inv_freq = nullptr;  // [K/2]
  char* rope = nullptr;        // [rope_positions(), K/2] pairs of floats
  char* fragment_rotations = nullptr;
  char* dim_rotations = nullptr;
  std::vector<char*> packed;      // per layer [B, H_kv, parents] packed parents
  std::vector<char*> spans;       // per layer [B, H_kv, parents, span rows] blocks, null where there are none
  char* top = nullptr;            // dense_layer_bytes()
  char* top_span_keys = nullptr;  // [B, H_kv, tiles]
  float* top_span_scales = nullptr;    // [B, H_kv, tiles * 128]
  int32_t* top_span_scaled = nullptr;  // [B, H_kv, tiles]
};
inline GrowingMemory lay_out_growing_tree(Workspace& space, const AttentionProblem& p,
                                          const TreeCapacity& capacity) {
  const int64_t heads = p.batch * p.num_kv_heads;
  const int64_t rotation_bytes = rotation_table_bytes(p.args.top_k + 1, p.key_dim);
  GrowingMemory memory;
  memory.inv_freq = space.take<double>(p.key_dim / 2);
  memory.rope = space.take<char>(rope_positions(p) * (p.key_dim / 2), 2 * sizeof(float));
  memory.fragment_rotations = space.take<char>(rotation_bytes);
  memory.dim_rotations = space.take<char>(rotation_bytes);
  for (size_t layer = 0; layer < capacity.parents.size(); ++layer) {
    const int64_t parents = heads * capacity.parents[layer], rows = capacity.span_rows[layer];
    memory.packed.push_back(space.take<char>(parents, packed_parent_bytes(p.key_dim, p.value_dim)));
    memory.spans.push_back(rows > 0 ? space.take<char>(parents * rows, packed_span_bytes(p.key_dim))
                                    : nullptr);
  }
  memory.top = space.take<char>(dense_layer_bytes(p, capacity.top_tiles * kDenseTileNodes));
  const int64_t tiles = heads * capacity.top_span_tiles;
  memory.top_span_keys = space.take<char>(tiles, dense_tile_bytes(p.key_dim));
  memory.top_span_scales = space.take<float>(tiles * kDenseTileNodes);
  memory.top_span_scaled = space.take<int32_t>(tiles);
  return memory;
}

inline int64_t growing_tree_bytes(const AttentionProblem& p, bool hopper) {
  Workspace space;
  lay_out_growing_tree(space, p, tree_capacity(p, hopper));
  return space.bytes();
}

// ---- what new tokens change

// Units [first, last).
struct UnitRange {
  int64_t first = 0;
  int64_t last = 0;
};
struct TreeChange {
  std::vector<UnitRange> packed;  // parents of each layer of the sequence
  std::vector<UnitRange> spans;   // the same, empty where the layer's span means are not packed
  UnitRange top;                  // tiles
  UnitRange top_spans;            // tiles
};

// Where the copies hold the first `begin` tokens of a sequence of p.num_keys. A copy that the shorter sequence did not
// have, such as those of a layer that has become the top, is made from its first unit on.
inline TreeChange tree_change(const AttentionProblem& p, bool hopper, int64_t begin) {
  const AttentionProblem before = with_tokens(p, begin);
  const auto change = [&](bool copied, int64_t tokens_of_unit, int64_t units) {
    return UnitRange{copied && begin > 0 ? std::min(begin / tokens_of_unit, units) : 0, units};
  };
  TreeChange result;
  for (int64_t layer = 0; layer < p.layers(); ++layer) {
    const int64_t tokens = node_span(kTensorCoreRate, layer + 1), parents = p.parents(layer);
    const bool existed = layer < before.layers();
    result.packed.push_back(change(existed, tokens, parents));
    result.spans.push_back(packs_spans(p, hopper, layer)
                               ? change(existed && packs_spans(before, hopper, layer), tokens, parents)
                               : UnitRange{});
  }
  const int64_t node_tokens = node_span(kTensorCoreRate, p.layers() - 1);
  const bool same_top = before.layers() == p.layers();
  if (tiles_top(p, hopper)) {
    result.top = change(same_top && tiles_top(before, hopper), node_tokens * kDenseTileNodes,
                        ceil_div(top_nodes(p), kDenseTileNodes));
  }
  if (tiles_top_spans(p, hopper)) {
    const SpanTiling tiling = span_tiling(span_rows(p, p.layers() - 1));
    const UnitRange groups = change(same_top && tiles_top_spans(before, hopper),
                                    node_tokens << tiling.nodes_log2, tiling.groups(top_nodes(p)));
    result.top_spans = {groups.first << tiling.tiles_log2, groups.last << tiling.tiles_log2};
  }
  return result;
}

}  // namespace htree::tree_attention
