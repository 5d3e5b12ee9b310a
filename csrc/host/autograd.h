// What the Autograd and ADInplaceOrView kernels of the rooms share. docs/semantics/conventions.md §0.5
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>

#include <initializer_list>

namespace htree {

using TensorRefs = std::initializer_list<std::reference_wrapper<const at::Tensor>>;

// C++ autograd functions have no jvp. Without this check the tangent of an input that does not require grad
// would be dropped, and forward-mode AD would silently give zeros.
inline void refuse_tangents(TensorRefs tensors) {
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        !tensor.defined() || !tensor._fw_grad(/*level=*/0).defined(),
        "htree: forward-mode automatic differentiation (torch.func.jvp, jacfwd) is not "
        "supported; use reverse mode");
  }
}

// Whether a graph must be recorded: grad mode is on and one of the tensors requires grad. Refuses tangents.
inline bool needs_grad(TensorRefs tensors) {
  refuse_tangents(tensors);
  if (!at::GradMode::is_enabled()) {
    return false;
  }
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined() && tensor.requires_grad()) {
      return true;
    }
  }
  return false;
}

// Mutating and out= ops return nothing, so torch's fallbacks would record no node and
// silently give wrong gradients.
inline void refuse_grad(const char* op, TensorRefs tensors) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !needs_grad(tensors), op,
      ": this op writes into its arguments and has no gradient; call it under torch.no_grad() "
      "or on tensors that do not require grad, or use the functional op");
}

// The Autograd kernel of a mutating op: refuses, or runs the op again below autograd.
template <typename Call>
void mutate_below_autograd(const char* op, TensorRefs tensors, Call&& call) {
  refuse_grad(op, tensors);
  at::AutoDispatchBelowAutograd guard;
  call();
}

// The ADInplaceOrView kernel of a mutating op: runs it below that key, then bumps the version
// of what it wrote.
template <typename Call>
void mutate_and_bump(TensorRefs mutated, Call&& call) {
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    call();
  }
  for (const at::Tensor& tensor : mutated) {
    if (!tensor.is_inference()) {
      tensor.unsafeGetTensorImpl()->bump_version();
    }
  }
}

[[noreturn]] inline void refuse_double_backward(const char* op) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, op, ": double backward is not supported");
}

}  // namespace htree
