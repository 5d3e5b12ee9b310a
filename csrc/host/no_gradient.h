// Outputs that have no gradient: a backward through them raises. docs/semantics/conventions.md §0.5
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include <initializer_list>
#include <string>

namespace htree {

// `outputs` as those of a node over `inputs`, whose backward raises NotImplementedError (a RuntimeError in Python) with
// `message` instead of silently giving zeros. In a compiled graph it raises when its backward runs. A node that raises
// itself, as torch's autogradNotImplementedFallback has it, raises when the backward is traced, so that a compiled call
// fails although nobody asks for a gradient.
torch::autograd::variable_list without_gradient(const torch::autograd::variable_list& inputs,
                                                const std::string& message,
                                                const torch::autograd::variable_list& outputs);

// The Autograd kernel of ops without a gradient formula: their floating outputs go through without_gradient.
void call_without_gradient(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);
void register_no_gradient(torch::Library& library, std::initializer_list<const char*> ops);

}  // namespace htree
