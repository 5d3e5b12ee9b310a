// The gradients of one layer of gathered or masked rows, whoever chose its lists: the launches of gradients.h in their
// order. A failed launch raises.
#pragma once

#include "ops/sparse_attention/cuda/gradients.h"
#include "ops/sparse_attention/cuda/sm90/backward/dense_rows/dense_gradients.h"
#include "ops/sparse_attention/plan/lists.h"
#include "ops/tree/cuda/tree_call.h"

namespace htree::tree_attention {

// All gradients of a layer by backward/per_list/, in as many launches as the memory of partial sums asks for.
struct PerListRuns {
  PartialSumParams sums;     // partials and tasks are set per launch; keys and values may be null
  int64_t tasks = 1;         // of kGradientRows rows, for each list
  char* partials = nullptr;  // partial_bytes of partial sums
  int64_t partial_bytes = 0;
  int64_t num_sms = 1;
};
void run_per_list_gradients(const TensorCoreShape& shape, const PerListRuns& layer, cudaStream_t stream);

// dQ of a layer by backward/shared_gather/ or backward/per_query/. `rotations`: as SharedGatherGradientParams.
void run_query_gradient(const TensorCoreShape& shape, const GradientKernels& kernels,
                        const QueryGradientParams& params, const __half2* rotations, cudaStream_t stream);

// dK and dV of a layer by backward/per_parent/. Its lists have windows whose rows stay in the L2 while all parents walk
// them.
void run_key_gradient(const TensorCoreShape& shape, const GradientKernels& kernels, KeyGradientParams params,
                      cudaStream_t stream);

// All wanted gradients of masked rows; their marks lie in `params` and are filled first.
void run_masked_gradients(const TensorCoreShape& shape, const MaskedGradientParams& params,
                          cudaStream_t stream);

}  // namespace htree::tree_attention
