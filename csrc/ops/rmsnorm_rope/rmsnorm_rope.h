// The contract of the rmsnorm_rope family: sizes, checks and entry points. docs/semantics/rmsnorm_rope.md §3.1
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/OptionalArrayRef.h>

#include <array>
#include <cstdint>
#include <optional>
#include <tuple>

namespace htree::rmsnorm_rope {

using Gradients = std::tuple<at::Tensor, at::Tensor>;  // dx, dweight; undefined where not wanted

// Whether one mean runs over the whole hidden dim (rmsnorm_rope) or over each head (head_rmsnorm_rope).
enum class Norm { kHidden, kHead };

// The name of the op in messages.
inline const char* op_name(Norm norm) {
  return norm == Norm::kHidden ? "rmsnorm_rope" : "head_rmsnorm_rope";
}
inline const char* backward_name(Norm norm) {
  return norm == Norm::kHidden ? "rmsnorm_rope_backward" : "head_rmsnorm_rope_backward";
}

// The arguments as they come. For kHidden x is [B, S, Hd] and weight [Hd]; for kHead x is [B, S, H, hd] and
// weight [hd]. cos and sin are [S', d], [1 or B, S', d] or [1 or B, S', 1, d] with S' >= S and d = hd or hd / 2.
struct Arguments {
  Norm norm;
  const at::Tensor& x;
  const at::Tensor& weight;
  const at::Tensor& cos;
  const at::Tensor& sin;
  double eps;
  std::optional<int64_t> num_heads;  // kHidden only
};

// Both forms in one: rows of `width` elements, each with its own mean, rotated in heads of `head_dim`.
struct Problem {
  int64_t batch;
  int64_t positions;
  int64_t heads;  // rows per position and batch: 1 for kHidden
  int64_t width;
  int64_t head_dim;
  bool half_tables;     // table rows have hd / 2 factors, which both halves of a head share
  bool batched_tables;  // each sequence of the batch has tables of its own
  double eps;

  int64_t num_rows() const { return batch * positions * heads; }
};

// Views in that form, with unit stride in the last dim: rows are [batch, positions, heads,
// width], tables [S', d] or [1 or batch, S', d].
struct Operands {
  Problem problem;
  at::Tensor x;
  at::Tensor weight;
  at::Tensor cos;
  at::Tensor sin;
};

// Elements from the table of one sequence to that of the next, in the form of Operands; 0 where all share one.
inline int64_t table_batch_stride(const at::Tensor& table) {
  return table.dim() == 3 && table.size(0) > 1 ? table.stride(0) : 0;
}

// Checks the arguments of the functional ops and returns the output: uninitialised, contiguous, of
// x's shape and dtype.
at::Tensor prepare(const Arguments& arguments, at::OptionalIntArrayRef config);
// Checks those of the backward ops and returns dx and dweight where `wanted`, uninitialised.
Gradients prepare_backward(const Arguments& arguments, const at::Tensor& dy, std::array<bool, 2> wanted);
// The operands of arguments that passed the checks.
Operands operands_of(const Arguments& arguments);
// [B, S, Hd] or [B, S, H, hd] as [batch, positions, heads, width] with unit stride in the last dim.
at::Tensor as_rows(Norm norm, const at::Tensor& x);

// Write every element of `out` [batch, positions, heads, width]. `config` is empty or a tuple
// of the tuning space.
void forward_cpu(const Operands& operands, at::IntArrayRef config, const at::Tensor& out);
void forward_cuda(const Operands& operands, at::IntArrayRef config, const at::Tensor& out);
// Write those of dx [batch, positions, heads, width] and dweight [width] that are defined.
void backward_cpu(const Operands& operands, const at::Tensor& dy, const Gradients& gradients);
void backward_cuda(const Operands& operands, const at::Tensor& dy, const Gradients& gradients);

}  // namespace htree::rmsnorm_rope
