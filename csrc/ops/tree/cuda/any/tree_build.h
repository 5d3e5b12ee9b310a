// One level of the tree: parent = mean of its children. docs/semantics/tree_attention.md §1.2, §1.10.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include "ops/tree/cuda/any/geometry.h"

namespace htree::tree_attention {

// Forward: takes children [B, N, H, D], writes parents [B, ceil(N/r), H, D]. Backward: takes the gradients of
// the parents, writes the gradients of the N children. Outputs are contiguous.
template <typename T>
struct TreeBuildParams {
  View<const T> in;
  T* out = nullptr;
  int64_t num_batches = 0;
  int64_t num_children = 0;  // N
  int64_t num_heads = 0;
  int64_t width = 0;  // D
  int64_t rate = 16;
};

// T is float, __half, __nv_bfloat16 or double.
template <typename T>
cudaError_t launch_tree_build(const TreeBuildParams<T>& params, cudaStream_t stream);
template <typename T>
cudaError_t launch_tree_build_backward(const TreeBuildParams<T>& params, cudaStream_t stream);

}  // namespace htree::tree_attention
