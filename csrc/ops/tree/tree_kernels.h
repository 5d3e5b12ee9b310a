// CPU and CUDA entry points of the tree and of rotations. Arguments come checked and outputs allocated
// (contiguous) by the prepare functions of the ops; a kernel writes every element of its outputs. Inputs may
// have any strides with a unit last one.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace htree::tree_attention {

using Tensor = at::Tensor;

// ---- build: docs/semantics/tree_attention.md §1.2
using TreeBuild = void(const Tensor& k, const Tensor& v, int64_t r, const Tensor& pk, const Tensor& pv);
using TreeBuildBackward = void(const Tensor& dpk, const Tensor& dpv, int64_t r, const Tensor& dk,
                               const Tensor& dv);
TreeBuild tree_build_cpu, tree_build_cuda;
TreeBuildBackward tree_build_backward_cpu, tree_build_backward_cuda;
// means [B, ceil(T / span), H, K]
using SpanMeans = void(const Tensor& k, int64_t span, const Tensor& means);
SpanMeans span_means_cpu, span_means_cuda;

// ---- rope: §1.4. positions int32 or int64, [T] or [B, T].
using Rope = void(const Tensor& x, const Tensor& cos, const Tensor& sin, const Tensor& positions,
                  bool inverse, const Tensor& out);
Rope rope_cpu, rope_cuda;

}  // namespace htree::tree_attention
