// The tokens of rows without rotations whose lists cover much of the sequence, on Hopper: docs/semantics/tree_attention.md
// §1.5, §1.7.
//
// A gather brings every parent of a list to every query that holds it. Where the lists of neighbouring queries together
// hold nearly all parents, and no pair (query, parent) has a rotation of its own, it costs less to multiply the tiles of
// the sequence as they lie and to take out what a query's list does not hold. So this is the kernel of forward/dense_rows/,
// which lays tokens out, takes its tasks and multiplies in the same way. What is added:
//
//   marks   tile_marks.cu makes the list of each task's tiles, and for every tile and token a byte with a bit per parent
//   mask    16 columns of a tile are a parent: a score is kept where the row's bit is set
//   state   a row's result is merged with what the layers above have left
//
// A tile without a mark of any of the task's queries is left out. Where a row of such a tile has no bit its weights are 0
// and nothing of its state changes. So a row's bits depend on its own list alone, whatever its neighbours hold.
#pragma once

#include "ops/sparse_attention/cuda/sm90/forward/dense_rows/attend.cuh"

namespace htree::tree_attention {

template <typename T, int kDim>
cudaError_t launch_masked_rows(const MaskedAttendParams& params, cudaStream_t stream) {
  return launch_rows<T, kDim, /*kMasked=*/true>(params.dense, params.marks, stream);
}

}  // namespace htree::tree_attention
