// Selection at a dense top on Hopper (sm_90a): r = 16, fp16 or bf16 inputs, K = V in {32, 64, 128}, G in {1, 2, 4,
// 8, 16}. The candidates of a query are the nodes 0 ... n - 1 of the layer, so scores are dense products of
// warpgroups instead of a gather. No torch.
//
// A selection is three launches over the leaders of a chunk: references (log-sums), importances, select.
#pragma once

#include "ops/tree_attention/cuda/tree/dense_layer.h"

namespace htree::tree_attention {

// What scores of a chunk are lowered by, in log2 units: [num_batches, num_lists, H_kv, G]. The log-sum over
// the candidates before the query's own node (kLse: with it), +inf where that is -inf; the maximum for
// kExpJoint.
struct DenseReferenceParams {
  GatherParams gather;  // its blocks and lists are not read
  DenseTiles tiles;     // from the chunk's first batch on
  Importance importance = Importance::kLseCausal;
  float* references = nullptr;
  int64_t reference_batch = 0;  // stride in elements
};
template <typename T, int kDim>
cudaError_t launch_dense_references(const DenseReferenceParams& params, cudaStream_t stream);

// importances[b, list, kv head, p] = sum over g in order of 2^(score - reference), p < n - 1; further entries
// of a row's last tile are unspecified.
struct DenseImportanceParams {
  DenseReferenceParams reference;
  float* importances = nullptr;  // [num_batches, num_lists, H_kv, width]
  int64_t width = 0;             // a multiple of 128, >= the largest n - 1 of the chunk
};
template <typename T, int kDim>
cudaError_t launch_dense_importances(const DenseImportanceParams& params, cudaStream_t stream);

}  // namespace htree::tree_attention
