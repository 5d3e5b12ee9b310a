// The rows that multiply whole tiles of tokens, dense rows and rows under the marks of their lists: which are masked, and
// their memory. Pure functions. No CUDA and no torch.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ops/sparse_attention/plan/lists.h"
#include "ops/tree/plan/dense_rows.h"
#include "ops/tree/plan/workspace.h"

namespace htree::tree_attention {

// ---- which rows

// Rows before this token multiply whole tiles of tokens, most of whose tokens they do not need, rather than gather.
//
// With 8 heads of 128 per K/V head an H200 takes, per row and 4 K/V heads, 1.1 us for the gather of 512 parents at any
// length, and 2.9e-5 us times t for dense causal attention, a tenth more under a mask: the product is the faster one
// while t < 4.3 k r. Half the heads are half the product, while the gather stays the same: its tiles have 8 columns, for
// whatever number of heads. Beyond 8 heads it takes two tiles. The factor ends at twice that of 8 heads: for fewer heads
// and longer sequences nothing was measured, and rows with still fewer listed tokens may leave tiles out.
//
// The backward has the same bound: its seven products take 3.5 times as long as the two of the forward, and its gathers
// were measured at 3.3 times those of the forward.
//
// The bound follows from the options alone, because a row must have the same bits in every call, and it is a multiple
// of r, so that no list reaches across it. A caller's row counts the entries of its own list in the place of k, see
// VisibleListParams: then the bound is that of its longest lists.
//
// The per-list kernels gather for all queries of a list at once. Only a caller's lists have masked rows there, a tree's dense
// rows being most of them, and only where a list has few rows: at stride 4 with 8 heads 512 parents take 0.65 of the time
// above, and masked rows save up to 22 % of a forward and 29 % of a backward of 32 768 tokens. At stride 16 they would cost
// up to 5 %.
constexpr int64_t kMaskedHeads = 32;     // heads times the bound in units of k r
constexpr int64_t kMaskedListRows = 32;  // the most of a list where the per-list kernels gather
constexpr int64_t kLeastMaskedLists = 2, kMostMaskedLists = 8;
inline int64_t masked_lists(const AttentionProblem& p) {  // the bound in units of k r
  if (p.args.selection_stride >= kMinPerListStride) {
    return p.args.selection_stride * p.group() <= kMaskedListRows ? kLeastMaskedLists : 0;
  }
  return std::clamp(kMaskedHeads / p.group(), kLeastMaskedLists, kMostMaskedLists);
}
inline int64_t choose_masked_rows(const AttentionProblem& p, const DeviceFacts& device, GatherChoice choice) {
  const GatherKernel gather = choose_gather(p, device, choice);
  // With rotations every pair (query, parent) has one of its own, and no product of whole tiles has that.
  if (choice == GatherChoice::kGathered || p.args.rotate || gather == GatherKernel::kPerQuery ||
      (gather == GatherKernel::kPerList && !p.listed)) {
    return 0;
  }
  return masked_lists(p) * p.args.top_k * kTensorCoreRate;
}

// ---- their memory

// Whether some row is a masked one.
inline bool masks_tiles(const AttentionProblem& p, const TreeConfig& config) {
  for (const Piece& piece : p.pieces()) {
    if (queries_before(piece, config.masked_rows) > dense_queries(piece, config)) {
      return true;
    }
  }
  return false;
}
// The most tiles that a masked row can have a listed parent in.
inline int64_t marked_tiles(const AttentionProblem& p, const TreeConfig& config) {
  return ceil_div(tiled_tokens(p, config), kDenseTileNodes);
}

// The bytes of the marks of a list at the tokens, see TileMarks.
inline int64_t mark_bytes_of_list(const AttentionProblem& p, const TreeConfig& config) {
  if (!masks_tiles(p, config)) {
    return 0;
  }
  const int64_t tile = p.num_kv_heads * (mark_bytes(p.group()) + 2);
  return ceil_div(p.args.selection_stride * tile * marked_tiles(p, config), run_tokens(p.group()));
}

// The same for every batch beside its lists: two runs may be cut.
inline int64_t mark_bytes_of_batch(const AttentionProblem& p, const TreeConfig& config) {
  return masks_tiles(p, config)
             ? 2 * p.num_kv_heads * (marked_tiles(p, config) * (mark_bytes(p.group()) + 2) + 4)
             : 0;
}

// The marks of a chunk's masked rows, see TileMarks in forward/attend.h.
struct TileMarkMemory {
  uint8_t* marks;
  uint16_t* tiles;
  int32_t* counts;
};
// The runs of a chunk over all batches and K/V heads: the tasks of its masked rows. Wherever it begins, it lies in no more.
inline int64_t marked_tasks(const AttentionProblem& p, const TreeConfig& c) {
  if (!masks_tiles(p, c)) {
    return 0;
  }
  const int64_t run = run_tokens(p.group()), rows = std::min(c.query_chunk, c.masked_rows);
  return c.batch_chunk * p.num_kv_heads * ((rows + run - 2) / run + 1);
}
inline TileMarkMemory lay_out_tile_marks(Workspace& space, const AttentionProblem& p, const TreeConfig& c) {
  const int64_t tasks = marked_tasks(p, c), tiles = tasks * marked_tiles(p, c);
  uint8_t* marks = space.take<uint8_t>(tiles * mark_bytes(p.group()));
  uint16_t* places = space.take<uint16_t>(tiles);
  return {marks, places, space.take<int32_t>(tasks)};
}

// ---- the rows before config.dense_rows: backward/dense_rows/ computes their gradients

// The tiles of rows of a batch and K/V head in the piece that has most.
inline int64_t dense_row_tiles(const AttentionProblem& p, const TreeConfig& config) {
  int64_t tiles = 0;
  for (const Piece& piece : p.pieces()) {
    if (const int64_t queries = dense_queries(piece, config); queries > 0) {
      tiles = std::max(tiles, kRunRows / kRowTileRows * num_runs(piece.start, queries, p.group()));
    }
  }
  return tiles;
}

struct DenseGradientMemory {
  char *queries, *gradients;  // [batches, H_kv, tiles] tiles
  float* numbers;             // [batches, H_kv, tiles, kRowNumbers, kRowTileRows]
  int32_t* scaled;            // [batches, H_kv, tiles]
  QueryBounds* bounds;        // [batches, H_kv]
};
// `tiles` of rows of all `heads`, which are pairs (batch, K/V head).
inline DenseGradientMemory lay_out_row_tiles(Workspace& space, const AttentionProblem& p, int64_t heads,
                                             int64_t tiles) {
  DenseGradientMemory memory;
  memory.queries = space.take<char>(tiles * row_tile_bytes(p.key_dim));
  memory.gradients = space.take<char>(tiles * row_tile_bytes(p.value_dim));
  memory.numbers = space.take<float>(tiles * kRowNumbers * kRowTileRows);
  memory.scaled = space.take<int32_t>(tiles);
  memory.bounds = space.take<QueryBounds>(tiles > 0 ? heads : 0, kQueryBoundsBytes);
  return memory;
}
inline DenseGradientMemory lay_out_dense_gradients(Workspace& space, const AttentionProblem& p,
                                                   const TreeConfig& config, int64_t batches) {
  const int64_t heads = batches * p.num_kv_heads;
  return lay_out_row_tiles(space, p, heads, heads * dense_row_tiles(p, config));
}
inline int64_t dense_gradient_bytes(const AttentionProblem& p, const TreeConfig& config, int64_t batches) {
  Workspace space;
  lay_out_dense_gradients(space, p, config, batches);
  return space.bytes();
}

// ---- the rows from there to config.masked_rows: at the tokens backward/masked_rows/ computes their gradients

// Of a chunk, in the memory of the partial sums: the tokens come last, and these rows have no partial sums there.
struct MaskedGradientMemory {
  DenseGradientMemory rows;
  TileMarkMemory marks;
  uint32_t* inverted_tiles;  // as in InvertedTiles, as is the next
  int32_t* inverted_tile_counts;
};
inline MaskedGradientMemory lay_out_masked_gradients(Workspace& space, const AttentionProblem& p,
                                                     const TreeConfig& c) {
  const int64_t heads = c.batch_chunk * p.num_kv_heads, tiles = marked_tiles(p, c);
  const int64_t row_tiles = kRunRows / kRowTileRows * marked_tasks(p, c);
  MaskedGradientMemory memory;
  memory.rows = lay_out_row_tiles(space, p, heads, row_tiles);
  memory.marks = lay_out_tile_marks(space, p, c);
  memory.inverted_tiles = space.take<uint32_t>(row_tiles * tiles);
  memory.inverted_tile_counts = space.take<int32_t>(row_tiles > 0 ? heads * tiles : 0);
  return memory;
}
inline int64_t masked_gradient_bytes(const AttentionProblem& p, const TreeConfig& c) {
  Workspace space;
  lay_out_masked_gradients(space, p, c);
  return space.bytes();
}

// About the bytes of that for every list of a chunk, and for every batch beside its lists: two runs may be cut.
struct MaskedGradientCost {
  int64_t list = 0, batch = 0;
};
inline MaskedGradientCost masked_gradient_cost(const AttentionProblem& p, const TreeConfig& config) {
  if (!masks_tiles(p, config)) {
    return {};
  }
  const int64_t tiles = marked_tiles(p, config);
  const int64_t row_tile = row_tile_bytes(p.key_dim) + row_tile_bytes(p.value_dim) +
                           (kRowNumbers * kRowTileRows + 1) * 4 + tiles * 4;
  const int64_t run =
      p.num_kv_heads * (kRunRows / kRowTileRows * row_tile + tiles * (mark_bytes(p.group()) + 2) + 4);
  return {ceil_div(p.args.selection_stride * run, run_tokens(p.group())),
          2 * run + p.num_kv_heads * (tiles * 4 + kQueryBoundsBytes)};
}

}  // namespace htree::tree_attention
