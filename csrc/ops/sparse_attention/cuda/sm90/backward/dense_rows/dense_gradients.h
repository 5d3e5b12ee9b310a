// Parameters and launchers of the gradients of dense rows (docs/semantics/tree_attention.md §1.5, §1.10), and of masked
// rows, whose kernels are the same under marks, on Hopper (sm_90a), any G. No torch.
#pragma once

#include <type_traits>

#include "ops/sparse_attention/cuda/gradients.h"
#include "ops/sparse_attention/cuda/sm90/tile_marks.h"
#include "ops/tree/plan/dense_rows.h"

namespace htree::tree_attention {

// The query side as tiles of kRowTileRows rows, two for each run, see rows.cuh.
struct RowTiles {
  char* queries = nullptr;    // [B, H_kv, num_tiles] tiles: rotated queries, fp16
  char* gradients = nullptr;  // [B, H_kv, num_tiles] tiles: dO
  float* numbers = nullptr;   // [B, H_kv, num_tiles, kRowNumbers, kRowTileRows]
  int32_t* scaled = nullptr;  // [B, H_kv, num_tiles]: some row has a power of two
  int num_tiles = 0;
};

struct DenseGradientParams {
  GatherParams gather;   // the queries, which stand at t0 and later; no lists and no packed parents
  TensorView gradients;  // dO [B, T_q, H, V], from the first query
  TensorView outputs;    // O [B, T_q, H, V], likewise
  RowStates states;
  DenseTiles tiles;  // of the tokens
  RowTiles rows;
  LayerBounds bounds;                   // of the tokens
  QueryBounds* query_bounds = nullptr;  // [B, H_kv], zeroed by the caller
  float scale = 0.f;
  void* query_gradient = nullptr;  // dQ [B, T_q, H, K]
  float* keys = nullptr;           // [B, H_kv, sum_rows, K]; null: not wanted
  float* values = nullptr;         // [B, H_kv, sum_rows, V]; null: not wanted
  int64_t sum_rows = 0;
  bool add = false;  // adds to what is there, else replaces it
};

// The tokens of masked rows, without rotations. `add` holds: the tokens' sums are there. Of a caller's lists the rows that
// gather are none for these kernels.
struct MaskedGradientParams : DenseGradientParams {
  TileMarks marks;
  InvertedTiles inverted;
  const float* query_sums = nullptr;  // [B, T_q, H, K] of the chunk: dQ of the layers above; null: none
  // Of a caller's lists, ListBoundParams::lists; null: the power of a row's dS is that of all tokens up to its own.
  const KeyBound* list_bounds = nullptr;
};
template <bool kMasked>
using RowGradientParams = std::conditional_t<kMasked, MaskedGradientParams, DenseGradientParams>;

// Fills params.rows and raises params.query_bounds. It comes before the other two.
template <typename T, int kDim>
cudaError_t launch_row_tiles(const DenseGradientParams& params, cudaStream_t stream);
template <typename T, int kDim>
cudaError_t launch_dense_query_gradient(const DenseGradientParams& params, cudaStream_t stream);
// dK and dV of every token up to the last query.
template <typename T, int kDim>
cudaError_t launch_dense_key_gradient(const DenseGradientParams& params, cudaStream_t stream);

// The same for masked rows. Marks and, for the tokens, inverted tiles must be there.
template <typename T, int kDim>
cudaError_t launch_masked_row_tiles(const MaskedGradientParams& params, cudaStream_t stream);
template <typename T, int kDim>
cudaError_t launch_masked_query_gradient(const MaskedGradientParams& params, cudaStream_t stream);
template <typename T, int kDim>
cudaError_t launch_masked_key_gradient(const MaskedGradientParams& params, cudaStream_t stream);

}  // namespace htree::tree_attention
