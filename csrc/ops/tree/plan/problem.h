// A call of tree attention on CUDA as numbers, the GPU as numbers, and the sizes of what the tensor-core
// kernels keep in memory. The choices of plan/ are pure functions of these. No CUDA and no torch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "device/sizes.h"
#include "ops/tree/tree_args.h"

namespace htree::tree_attention {

// ---- sizes in memory

constexpr int kTensorCoreRate = 16;  // r of all tensor-core kernels

// Queries of a task of backward/per_list/ at the top, where no lists are needed.
constexpr int kGradientRun = 16;

// Rows (query, head) of a task of backward/per_list/. A list of stride * G rows takes ceil(stride *
// G / kGradientRows) tasks.
constexpr int kGradientRows = 128;

// The packed keys and values of a parent's children, see packed_layer.cuh.
constexpr int64_t packed_parent_bytes(int64_t key_dim, int64_t value_dim) {
  return kTensorCoreRate * (2 * key_dim + 4 + 2 * value_dim);
}

// The record of a query as tiles of `rows` rows, see gradient_rows.cuh. Where records are paired, the query heads are
// kPairedGroup, and two queries share a tile of kRecordRows.
constexpr int kRecordRows = 8;
constexpr int kPairedGroup = 4;
constexpr int64_t tiled_record_bytes(int64_t rows, int64_t key_dim, int64_t value_dim) {
  return rows * (2 * (key_dim + value_dim) + 16);
}

// A rotation table, see launch_rotation_table() in copies.h.
constexpr int64_t rotation_table_bytes(int64_t num_slots, int64_t key_dim) {
  return num_slots * key_dim * 2;
}

// A tile of keys or of values of a dense top layer, see dense_layer.cuh.
constexpr int kDenseTileNodes = 128;
constexpr int64_t dense_tile_bytes(int64_t dim) {
  return (dim + 63) / 64 * kDenseTileNodes * 128;
}

// A partial sum: dK' and dV of a parent's 16 children in bf16, see backward/per_list/.
constexpr int64_t partial_sum_bytes(int64_t key_dim, int64_t value_dim) {
  return kTensorCoreRate * 2 * (key_dim + value_dim);
}

// Slots that one warp scores: few enough to fill the chip, enough to hide the start of a warp.
constexpr int kRunSlots = 64;
constexpr int64_t score_runs(int64_t score_width) {
  return (score_width + kRunSlots * kTensorCoreRate - 1) / (kRunSlots * kTensorCoreRate);
}

constexpr int kInvertedListRows =
    256;  // list rows that one thread block of inverted_lists.cu counts and places

// ---- the call and the GPU

// Neighbouring queries of a call at neighbouring tokens: from `query` and from token `start` on.
struct Piece {
  int64_t query, start, queries;
};

struct AttentionProblem {
  int64_t batch = 0;
  int64_t num_keys = 0;     // T
  int64_t num_queries = 0;  // T_q
  int64_t num_heads = 0;
  int64_t num_kv_heads = 0;
  int64_t key_dim = 0;
  int64_t value_dim = 0;
  bool half_dtype = false;  // fp16 or bf16
  bool listed = false;      // a caller gives the lists of the only layer; else those of the top are implied
  AttentionArgs args;

  int64_t group() const { return num_heads / num_kv_heads; }
  int64_t layers() const { return num_layers(num_keys, args.max_top_nodes, args.compression_rate); }
  int64_t num_lists() const { return ceil_div(num_queries, args.selection_stride); }
  // The number of nodes of a layer, 0 being the tokens.
  int64_t nodes(int64_t layer) const {
    int64_t count = num_keys;
    for (; layer > 0; --layer) {
      count = ceil_div(count, args.compression_rate);
    }
    return count;
  }
  int64_t parents(int64_t layer) const { return ceil_div(nodes(layer), args.compression_rate); }
  // The pieces of AttentionArgs::starts, where those that follow one another in the sequence are one. A chunk never has
  // queries of two pieces, so every piece may leave a part of a wave idle.
  std::vector<Piece> pieces() const {
    const int64_t equal = num_queries / static_cast<int64_t>(args.starts.size());
    std::vector<Piece> result;
    for (const int64_t start : args.starts) {
      if (!result.empty() && result.back().start + result.back().queries == start) {
        result.back().queries += equal;
      } else {
        const int64_t query = result.empty() ? 0 : result.back().query + result.back().queries;
        result.push_back({query, start, equal});
      }
    }
    return result;
  }
  // The token of a query.
  int64_t token_of(int64_t query) const { return token_of_query(args, num_queries, query); }
  // The queries of a chunk that begins with `query` and takes at most `most`.
  int64_t chunk_queries(int64_t query, int64_t most) const {
    for (const Piece& piece : pieces()) {
      if (query < piece.query + piece.queries) {
        return std::min(most, piece.query + piece.queries - query);
      }
    }
    return most;  // there is no such query
  }
};

// What the choices need to know of a GPU.
struct DeviceFacts {
  int major = 0;             // of the compute capability
  int64_t shared_bytes = 0;  // the most dynamic shared memory of a thread block
  bool hopper = false;       // sm_90, and the library has code for sm_90a
  int64_t num_sms = 1;
};

inline bool hopper_kernels(const DeviceFacts& facts) {
  return facts.hopper && facts.shared_bytes >= device::kHopperSharedBytes;
}

// The most candidates of a list on the tensor-core path, where the keys of a row are ranked in registers.
constexpr int64_t kMaxSelectWidth = 16384;

// The most shared memory of a thread block in forward and backward. One number serves both, so that
// recomputed lists are the forward's. Heads of 128 need 112 KB, which consumer GPUs (99 KB) do not have.
inline int64_t tensor_core_shared_bytes(const AttentionProblem& p) {
  return p.key_dim == 128 ? 112 * 1024 : 64 * 1024;
}

// The nodes of the top layer.
inline int64_t top_nodes(const AttentionProblem& p) {
  return p.nodes(p.layers() - 1);
}

// The most entries of a list in a layer. The list of the top is implied and names all parents.
inline int64_t most_parents(const AttentionProblem& p, int64_t layer) {
  const bool whole = layer + 1 == p.layers() && !p.listed;
  return whole ? p.parents(layer) : std::min(p.args.top_k, p.parents(layer));
}
// The positions that the general kernels rotate keys and queries to.
inline int64_t rotated_positions(const AttentionProblem& p) {
  return std::max(most_parents(p, 0), most_parents(p, p.layers() - 1)) * p.args.compression_rate;
}
// The most entries of a list, at any layer.
inline int64_t list_capacity(const AttentionProblem& p) {
  return std::max(p.args.top_k, most_parents(p, p.layers() - 1));
}

inline bool tensor_core_shape(const AttentionProblem& p) {
  return p.half_dtype && p.args.compression_rate == 16 && p.key_dim == p.value_dim &&
         (p.key_dim == 32 || p.key_dim == 64 || p.key_dim == 128) && p.group() <= 16 &&
         p.args.top_k * 16 <= kMaxSelectWidth &&
         (p.layers() == 1 || p.args.max_top_nodes <= kMaxSelectWidth) && p.num_kv_heads <= 65535 &&
         ceil_div(p.num_keys, 16) < (int64_t{1} << 27);
}

// The floats of a row of importances at a dense top.
inline int64_t importance_width(int64_t num_nodes) {
  return ceil_div(num_nodes, kDenseTileNodes) * kDenseTileNodes;
}

constexpr int64_t kTopLists = 256;  // query rows of a thread block at a dense top; a list has G of them

// ---- the scores of a dense top that has few lists, such as those of a chunk of a prompt
//
// A thread block of kTopLists rows walks all tiles of the top. Where the blocks fill no wave, the time is that of one
// block.

// The query rows of a thread block that sums weights, each row's in the order of the tiles: kTopLists, or half of them
// where that takes fewer waves. A block of half the rows takes 9/16 of the time of a whole one, because fewer products
// run while others take exponentials. `rows` are those of a pair (batch, K/V head), of which there are `heads`.
inline int64_t reference_rows(int64_t rows, int64_t heads, int64_t num_sms) {
  const auto waves = [&](int64_t block) { return ceil_div(ceil_div(rows, block) * heads, num_sms); };
  return 9 * waves(kTopLists / 2) < 16 * waves(kTopLists) ? kTopLists / 2 : kTopLists;
}

// The blocks that share the tiles of the same rows where every tile stands alone. A block takes as long as kScoreStart
// tiles to bring its queries to shared memory.
constexpr int64_t kScoreStart = 5, kMostScoreParts = 8;
inline int64_t importance_parts(int64_t blocks, int64_t tiles, int64_t num_sms) {
  const auto time = [&](int64_t parts) {
    return ceil_div(blocks * parts, num_sms) * (ceil_div(tiles, parts) + kScoreStart);
  };
  int64_t best = 1;
  for (int64_t parts = 2; parts <= kMostScoreParts; parts *= 2) {
    best = time(parts) < time(best) ? parts : best;
  }
  return best;
}

// Needs more than one layer: a single layer has nothing to select, and its softmax runs on the kernels of
// gathered layers. A thread block indexes the importances of its rows with 32 bits.
inline bool dense_top_shape(const AttentionProblem& p) {
  const int64_t group = p.group();
  return tensor_core_shape(p) && p.layers() > 1 && (group & (group - 1)) == 0 &&
         p.num_kv_heads * importance_width(top_nodes(p)) * kTopLists < (int64_t{1} << 32);
}

// ---- nodes scored by span means: docs/semantics/tree_attention.md §1.15

// The span means of a node of a layer above the tokens, or 1 if nodes are scored by their stored means.
inline int64_t span_rows(const AttentionProblem& p, int64_t layer) {
  return p.args.selection_span > 0 ? node_span(p.args.compression_rate, layer) / p.args.selection_span : 1;
}

// 16 span means, one of each child of a parent, see span_copies.cuh.
constexpr int64_t packed_span_bytes(int64_t key_dim) {
  return kTensorCoreRate * (2 * key_dim + 4);
}

// How the span means of a dense top are arranged in tiles of 128 rows. A group of tiles holds whole
// nodes, at least four, and one thread block scores a run of groups. All numbers are powers of two,
// because spans divide 16.
struct SpanTiling {
  int rows_log2 = 0;   // span means of a node in one tile, at most 32
  int nodes_log2 = 0;  // nodes of a group
  int tiles_log2 = 0;  // tiles of a group
  int run_log2 = 0;    // groups of a run

  int64_t groups(int64_t nodes) const { return ceil_div(nodes, int64_t{1} << nodes_log2); }
  int64_t runs(int64_t nodes) const { return ceil_div(nodes, int64_t{1} << (nodes_log2 + run_log2)); }
};
constexpr int kSpanRowsLog2 = 5;      // the most span means of a node in a tile: one thread sums these
constexpr int kSpanRunTilesLog2 = 5;  // a thread block then takes a hundred times as long as its start
constexpr int kSpanTileRowsLog2 = 7;
inline SpanTiling span_tiling(int64_t rows) {
  int log2 = 0;
  for (; rows > 1; rows /= 2) {
    ++log2;
  }
  SpanTiling tiling;
  tiling.rows_log2 = std::min(log2, kSpanRowsLog2);
  tiling.nodes_log2 = kSpanTileRowsLog2 - tiling.rows_log2;
  tiling.tiles_log2 = log2 - tiling.rows_log2;
  tiling.run_log2 = std::max(0, kSpanRunTilesLog2 - tiling.tiles_log2);
  return tiling;
}

// Whether the span means of a dense top are scored as dense products too. The selection then keeps a weight
// per group and head in shared memory; only millions of tokens with 16 heads per K/V head and a `top_k` near
// 1024 need more than there is.
constexpr int64_t kSpanWeightBytes = 160 << 10;
inline bool dense_span_shape(const AttentionProblem& p) {
  const int64_t rows = span_rows(p, p.layers() - 1);
  return dense_top_shape(p) && rows > 1 &&
         span_tiling(rows).groups(top_nodes(p)) * p.group() * 4 <= kSpanWeightBytes;
}

// The words of a row of a mask of candidates, whose size is a multiple of 16 bytes.
inline int64_t mask_words(const AttentionProblem& p) {
  return ceil_div(list_capacity(p) * kTensorCoreRate, 128) * 4;
}

}  // namespace htree::tree_attention
