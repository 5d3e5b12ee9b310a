#include "host/no_gradient.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "host/autograd.h"
#include "host/each_tensor.h"
#include "host/op_handle.h"
#include "host/registration.h"

namespace htree {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::isDifferentiableType;
using torch::autograd::variable_list;

// What raises is an op, which a compiler can trace without running it.
struct NoGradient : torch::autograd::Function<NoGradient> {
  static constexpr bool is_traceable = true;

  // `outputs` is a function because tensors in the arguments would count as inputs.
  static variable_list forward(AutogradContext* ctx, at::TensorList inputs, const std::string& message,
                               const std::function<variable_list()>& outputs) {
    ctx->set_materialize_grads(false);
    ctx->saved_data["message"] = message;
    ctx->saved_data["inputs"] = static_cast<int64_t>(inputs.size());
    for (size_t i = 0; i < inputs.size(); ++i) {
      ctx->saved_data["size" + std::to_string(i)] = inputs[i].sym_sizes();
    }
    return outputs();
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    static const auto refuse =
        op_handle<Tensor(const Tensor&, std::string_view, c10::SymIntArrayRef)>("htree::_refuse_backward");
    const auto given = std::find_if(gradients.begin(), gradients.end(),
                                    [](const Tensor& gradient) { return gradient.defined(); });
    const std::string message = ctx->saved_data["message"].toStringRef();
    const auto inputs = static_cast<size_t>(ctx->saved_data["inputs"].toInt());
    variable_list refused(inputs + 2);  // message and outputs have none
    for (size_t i = 0; i < inputs && given != gradients.end(); ++i) {
      if (ctx->needs_input_grad(i)) {
        const auto size = ctx->saved_data["size" + std::to_string(i)].toSymIntVector();
        refused[i] = refuse.call(*given, message, size);
      }
    }
    return refused;
  }
};

// raise NotImplementedError(message)
Tensor refuse_backward(const Tensor& /*gradient*/, std::string_view message, c10::SymIntArrayRef /*size*/) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, message);
}

// gradient.new_empty(size)
Tensor refuse_backward_meta(const Tensor& gradient, std::string_view /*message*/, c10::SymIntArrayRef size) {
  return at::empty_symint(size, gradient.options());
}

}  // namespace

void call_without_gradient(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                           torch::jit::Stack* stack) {
  variable_list inputs;  // that require grad
  const size_t first = stack->size() - op.schema().arguments().size();
  for (size_t i = first; i < stack->size(); ++i) {
    for_each_tensor((*stack)[i], [&](const Tensor& x) {
      if (needs_grad({x})) inputs.push_back(x);
    });
  }
  {
    at::AutoDispatchBelowAutograd guard;
    op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
  }
  if (inputs.empty()) return;

  variable_list outputs;
  const auto for_each_output = [&](const auto& visit) {  // that could have a gradient
    for (size_t i = first; i < stack->size(); ++i) {
      for_each_tensor((*stack)[i], [&](Tensor& x) {
        if (isDifferentiableType(x.scalar_type())) visit(x);
      });
    }
  };
  for_each_output([&](Tensor& x) { outputs.push_back(x); });
  if (outputs.empty()) return;
  const std::string message =
      "derivative for " + op.schema().name() +
      " is not implemented: the op has no gradient. Call it under torch.no_grad(), or "
      "detach what requires one";
  outputs = without_gradient(inputs, message, outputs);
  auto next = outputs.begin();
  for_each_output([&](Tensor& x) { x = *next++; });
}

variable_list without_gradient(const variable_list& inputs, const std::string& message,
                               const variable_list& outputs) {
  const std::function<variable_list()> plain = [&] { return outputs; };
  return NoGradient::apply(at::TensorList(inputs), message, plain);
}

void register_no_gradient(torch::Library& library, std::initializer_list<const char*> ops) {
  const OpKernels autograd(library, DispatchKey::Autograd);
  for (const char* op : ops) {
    autograd.impl(op, torch::CppFunction::makeFromBoxedFunction<&call_without_gradient>());
  }
}

TORCH_LIBRARY_FRAGMENT(HTREE_NAMESPACE, library) {
  define_ops(library, {"_refuse_backward(Tensor gradient, str message, SymInt[] size) -> Tensor"});
  OpKernels(library, DispatchKey::CPU).impl("_refuse_backward", TORCH_FN(refuse_backward));
#if defined(HTREE_WITH_CUDA)
  OpKernels(library, DispatchKey::CUDA).impl("_refuse_backward", TORCH_FN(refuse_backward));
#endif
  OpKernels(library, DispatchKey::Meta).impl("_refuse_backward", TORCH_FN(refuse_backward_meta));
  register_no_gradient(library, {"_refuse_backward"});
}

}  // namespace htree
