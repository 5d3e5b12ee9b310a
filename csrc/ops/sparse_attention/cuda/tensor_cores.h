// sparse_attention on tensor cores: docs/semantics/sparse_attention.md §8. fp16 or bf16, K = V of 32, 64 or 128, blocks of
// whole sixteens.
#pragma once

#include <cuda_runtime_api.h>

#include "ops/sparse_attention/plan/sparse.h"
#include "ops/sparse_attention/sparse_attention.h"

namespace htree::tree_attention {

// The sizes of a call, with blocks as long as the caller asked for.
SparseProblem given_problem(const SparseCall& call);
// Whether the current device computes a call on tensor cores.
bool takes_tensor_cores(const SparseCall& call);

// As SparseForward. The caller holds a LaunchScope with this stream, as for the next.
void sparse_forward_tensor_cores(const SparseCall& call, const Tensor& out, const Tensor& lse,
                                 cudaStream_t stream);

// As SparseBackward; `dout` counts the keys' share of the softmax alone, sinks left out.
void sparse_backward_tensor_cores(const SparseCall& call, const SparseResults& results, const Tensor& dout,
                                  const Tensor& dlse, const SparseGradients& gradients, cudaStream_t stream);

}  // namespace htree::tree_attention
