// The contract of the gated_mlp family: sizes, checks and entry points. docs/semantics/gated_mlp.md §3.2
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/OptionalArrayRef.h>

#include <array>
#include <cstdint>
#include <string_view>
#include <tuple>

#include "ops/gated_mlp/gated_mlp_params.h"

namespace htree::gated_mlp {

using Mask = std::array<bool, 3>;
using Products = std::tuple<at::Tensor, at::Tensor, at::Tensor>;   // out, gate, up: [..., inner]
using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;  // dx, dgate_weight, dup_weight

// The arguments as they come: x [..., hidden], weights [inner, hidden].
struct Arguments {
  const at::Tensor& x;
  const at::Tensor& gate_weight;
  const at::Tensor& up_weight;
  std::string_view activation;
  std::string_view act_on;
};

// x as [rows, hidden], and the weights by role: out = (x linear^T) * act(x acted^T). act_on = "gate"
// exchanges the weights and everything that belongs to one of them, and changes nothing else.
struct Operands {
  Sizes sizes;
  Activation activation;
  bool swapped;  // act_on = "gate": linear is up_weight
  at::Tensor x;
  at::Tensor linear;
  at::Tensor acted;
};

void check_config(at::OptionalIntArrayRef config);
// Checks the arguments of gated_mlp and returns out: uninitialised, contiguous, of x's dtype.
at::Tensor prepare(const Arguments& arguments, at::OptionalIntArrayRef config);
// Checks those of gated_mlp_forward and returns out, gate and up, of the same kind.
Products prepare_forward(const Arguments& arguments);
// Checks those of gated_mlp_backward and returns the gradients that are `wanted`, uninitialised.
Gradients prepare_backward(const Arguments& arguments, const at::Tensor& dy, Mask wanted);
// The same for gated_mlp_saved_backward, with gate and up as gated_mlp_forward returned them.
Gradients prepare_saved_backward(const Arguments& arguments, const at::Tensor& dy, const at::Tensor& gate,
                                 const at::Tensor& up, Mask wanted);
// The operands of arguments that passed the checks.
Operands operands_of(const Arguments& arguments);

// Results by role, [rows, inner], contiguous. Products that are not wanted are undefined.
struct Results {
  at::Tensor out;
  at::Tensor linear;  // x linear^T
  at::Tensor acted;   // x acted^T
};

// dy is [rows, inner]. The products are those that were saved, or undefined where they must be computed
// again. The gradients to write, dx [rows, hidden] and those of the weights by role, are undefined where they
// are not wanted.
struct BackwardOperands {
  at::Tensor dy;
  at::Tensor linear_product;
  at::Tensor acted_product;
  at::Tensor dx;
  at::Tensor dlinear;
  at::Tensor dacted;
};

// Write every element of the results. rows, inner and hidden are at least 1. `config` is empty or a tuple of
// the tuning space.
void forward_cpu(const Operands& operands, at::IntArrayRef config, const Results& results);
void forward_cuda(const Operands& operands, at::IntArrayRef config, const Results& results);
void backward_cpu(const Operands& operands, const BackwardOperands& backward);
void backward_cuda(const Operands& operands, const BackwardOperands& backward);

}  // namespace htree::gated_mlp
