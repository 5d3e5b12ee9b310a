// What the Autograd and ADInplaceOrView kernels of the families share. docs/semantics/conventions.md §0.5
#pragma once

#include <ATen/FuncTorchTLS.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <array>
#include <functional>
#include <initializer_list>
#include <iterator>
#include <optional>
#include <string>
#include <tuple>

#include "host/no_gradient.h"

namespace htree {

using TensorRefs = std::initializer_list<std::reference_wrapper<const at::Tensor>>;

// C++ autograd functions have no jvp. Without this check the tangent of an input that does not require grad
// would be dropped, and forward-mode AD would silently give zeros.
inline void refuse_tangents(TensorRefs tensors) {
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        !tensor.defined() || !tensor._fw_grad(/*level=*/0).defined(),
        "htree: forward-mode automatic differentiation (torch.func.jvp, jacfwd) is not "
        "supported; use reverse mode: torch.autograd.grad");
  }
}

// torch refuses C++ autograd functions inside torch.func.grad and the like, in words that name no way out.
inline void refuse_functorch() {
  const auto& functorch = at::functorch::functorchTLSAccessor();
  if (functorch == nullptr) {
    return;
  }
  bool supported = true;
  try {
    functorch->checkSupportsCppAutogradFunction();
  } catch (const c10::Error&) {
    supported = false;
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      supported,
      "htree: torch.func.grad, vjp and jacrev (functorch transforms) are not supported; use "
      "torch.autograd.grad or "
      "backward() on tensors that require grad, with torch.func.functional_call for parameters of your own");
}

// Whether a graph must be recorded: grad mode is on and one of the tensors requires grad. Refuses tangents
// and the transforms of torch.func.
inline bool needs_grad(TensorRefs tensors) {
  refuse_tangents(tensors);
  if (!at::GradMode::is_enabled()) {
    return false;
  }
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined() && tensor.requires_grad()) {
      refuse_functorch();
      return true;
    }
  }
  return false;
}

// A gradient as an op takes it that may do without.
inline std::optional<at::Tensor> if_defined(const at::Tensor& gradient) {
  return gradient.defined() ? std::optional(gradient) : std::nullopt;
}

// The Autograd kernel of a backward op. `call` runs it and returns its tuple of gradients, undefined where
// `output_mask` is false. Differentiating them again raises in the name of `op`.
template <size_t kCount, typename Call>
auto once_differentiable(const char* op, TensorRefs inputs, const std::array<bool, kCount>& output_mask,
                         const Call& call) {
  using torch::autograd::variable_list;
  const bool any_wanted =
      std::any_of(output_mask.begin(), output_mask.end(), [](bool wanted) { return wanted; });
  const bool records = any_wanted && needs_grad(inputs);
  auto gradients = [&] {
    at::AutoDispatchBelowAutograd guard;
    return call();
  }();
  if (records) {
    variable_list wanted;
    const auto for_each_wanted = [&](const auto& visit) {
      std::apply([&](auto&... gradient) { ((gradient.defined() ? visit(gradient) : void()), ...); },
                 gradients);
    };
    for_each_wanted([&](at::Tensor& gradient) { wanted.push_back(gradient); });
    variable_list tensors;
    std::copy_if(inputs.begin(), inputs.end(), std::back_inserter(tensors),
                 [](const at::Tensor& x) { return x.defined(); });
    wanted = without_gradient(tensors, std::string(op) + ": double backward is not supported", wanted);
    auto next = wanted.begin();
    for_each_wanted([&](at::Tensor& gradient) { gradient = *next++; });
  }
  return gradients;
}

}  // namespace htree
