// The gradients of the tokens for rows without rotations whose lists cover much of the sequence, on Hopper:
// docs/semantics/tree_attention.md §1.10, §1.14.
//
// These are the kernels of backward/dense_rows/ for the rows of forward/masked_rows/, where the layers above the tokens
// keep their own. What is added:
//
//   marks   dQ: as in the forward, a run of rows walks the tiles that some list of its has a parent in.
//           dK, dV: a tile of tokens walks the tiles of rows that have a mark in it, InvertedTiles
//   mask    a row's weights at parents that its list does not hold are 0, and so are its dS
//   sums    dQ is added to that of the layers above; dK and dV are added to what is there, as each K/V head's rows walk
//           through a tile of tokens in their order and no other block has it
//
// The numbers of a row are those of its whole softmax, so nothing of the layers above enters but their dQ.
#pragma once

#include "ops/sparse_attention/cuda/sm90/backward/dense_rows/key_gradient.cuh"
#include "ops/sparse_attention/cuda/sm90/backward/dense_rows/query_gradient.cuh"

namespace htree::tree_attention {

template <typename T, int kDim>
cudaError_t launch_masked_row_tiles(const MaskedGradientParams& params, cudaStream_t stream) {
  return launch_row_tiles_as<T, kDim, /*kMasked=*/true>(params, stream);
}

template <typename T, int kDim>
cudaError_t launch_masked_query_gradient(const MaskedGradientParams& params, cudaStream_t stream) {
  return launch_query_gradient_of_rows<T, kDim, /*kMasked=*/true>(params, stream);
}

template <typename T, int kDim>
cudaError_t launch_masked_key_gradient(const MaskedGradientParams& params, cudaStream_t stream) {
  return launch_key_gradient_of_rows<T, kDim, /*kMasked=*/true>(params, stream);
}

}  // namespace htree::tree_attention
