// The lists of masked rows (docs/semantics/tree_attention.md §1.14) as marks of tiles: which tiles of tokens a run of rows
// needs, and which rows need a tile of tokens. tile_marks.cu makes both for forward/masked_rows/ and
// backward/masked_rows/. Hopper (sm_90a). No torch.
#pragma once

#include "ops/tree/cuda/launch_params.h"
#include "ops/tree/plan/dense_rows.h"

namespace htree::tree_attention {

// For each task (batch and K/V head, run) the tiles in which some list of the run holds a parent, ascending. The last one
// is that of the run's own tokens, and it always is there. Byte i of a tile's marks is that of the run's token i: bit p
// says that its list holds parent p of the tile. Bytes of tokens that the call does not ask for are 0, and so are bits of
// parents behind a token's own.
struct TileMarks {
  uint8_t* marks = nullptr;   // [tasks, width, mark_bytes(G)]
  uint16_t* tiles = nullptr;  // [tasks, width]
  int32_t* counts = nullptr;  // [tasks]
  int width = 0;
};
// Lists should be those of the selection: ascending, and a list holds the parent of its queries.
cudaError_t launch_tile_marks(const GatherParams& gather, const TileMarks& marks, cudaStream_t stream);

// For each tile of tokens of a (batch, K/V head) the tiles of kRowTileRows rows, half a run each, that have a mark in it,
// ascending: the number of the tile of rows, counted from the first one of the launch, times 2^16, and the place of the
// tile of tokens among those of the run. Tiles behind the last query have none and are not written.
struct InvertedTiles {
  uint32_t* row_tiles = nullptr;  // [B, H_kv, width, 2 * runs]
  int32_t* counts = nullptr;      // [B, H_kv, width]
};
// From marks that launch_tile_marks made for the same rows.
cudaError_t launch_inverted_tiles(const GatherParams& gather, const TileMarks& marks,
                                  const InvertedTiles& inverted, cudaStream_t stream);

}  // namespace htree::tree_attention
