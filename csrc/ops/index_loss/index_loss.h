// Contract of the loss of an index: sizes, checks, outputs, and what CPU and CUDA have to provide.
// docs/semantics/index_loss.md §9.3
#pragma once

#include <array>
#include <optional>
#include <tuple>

#include "ops/tree/tree_checks.h"

namespace htree::index_loss {

using at::Tensor;
using c10::SymInt;
using OptionalTensor = std::optional<Tensor>;

struct Options {
  std::optional<double> scale;
  int64_t block_size = 16;
};

// The tensors of a call. Packed documents have no batch: [N, H, K] and so on, and offsets.
struct Inputs {
  Tensor query;        // [B, T, H, K]
  Tensor key;          // [B, T, H_kv, K]
  Tensor index_query;  // [B, T, H_i, d], H_i is H_kv or 1
  Tensor index_key;    // [B, T, H_i, d]
  Tensor positions;    // int64 [rows] or [B, rows]
  Tensor cu_seqlens;   // int32 [documents + 1] or undefined
};

// loss []; lse [B, rows, H] of the attention on the counted tokens and index_lse [B, rows, H_i] of the block scores, for
// ascending positions and in the state dtype. B is 1 for packed documents.
using Results = std::tuple<Tensor, Tensor, Tensor>;
using Gradients = std::tuple<Tensor, Tensor>;  // of index_query and index_key
using GradientMask = std::array<bool, 2>;

// Check the arguments and return uninitialised outputs, contiguous.
Results prepare_forward(const char* op, const Inputs& x, const Options& options);
// The gradients that `mask` wants; the others are undefined. Checks what a forward gave and its gradient too.
Gradients prepare_backward(const char* op, const Inputs& x, const Results& results, const Tensor& dloss,
                           const GradientMask& mask);

// A call as the kernels take it: sizes are real, batch, rows and tokens at least 1, tensors have a batch and a unit last
// stride.
struct Call {
  const char* op;
  Tensor query, key, index_query, index_key;
  Tensor positions;   // int64 [B, rows], contiguous, ascending
  Tensor cu_seqlens;  // contiguous, or undefined
  double scale;
  int64_t block_size;

  int64_t batch() const { return query.size(0); }
  int64_t tokens() const { return query.size(1); }
  int64_t heads() const { return query.size(2); }
  int64_t key_dim() const { return query.size(3); }
  int64_t kv_heads() const { return key.size(2); }
  int64_t group() const { return heads() / kv_heads(); }
  int64_t index_heads() const { return index_query.size(2); }
  int64_t index_dim() const { return index_query.size(3); }
  int64_t rows() const { return positions.size(1); }
};

// Each writes every element of its results; a gradient that is not wanted is undefined.
using ForwardKernel = void(const Call& call, const Results& results);
using BackwardKernel = void(const Call& call, const Tensor& lse, const Tensor& index_lse, const Tensor& dloss,
                            const Gradients& gradients);
struct Kernels {
  ForwardKernel* forward;
  BackwardKernel* backward;
};
ForwardKernel forward_cpu, forward_cuda;
BackwardKernel backward_cpu, backward_cuda;
constexpr Kernels kCpu = {forward_cpu, backward_cpu};
constexpr Kernels kCuda = {forward_cuda, backward_cuda};

}  // namespace htree::index_loss
