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
#include "host/op_handle.h"
#include "host/registration.h"

namespace htree {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::isDifferentiableType;
using torch::autograd::variable_list;

constexpr char kRefuse[] = "htree::refuse_backward";

// Calls `visit` with every defined tensor of `value`, those of a list too, and keeps what it assigns to them.
template <typename Visit>
void for_each_tensor(c10::IValue& value, const Visit& visit) {
  if (value.isTensorList()) {
    std::vector<Tensor> list = value.toTensorVector();
    std::for_each(list.begin(), list.end(), visit);
    value = std::move(list);
  } else if (value.isTensor() && value.toTensor().defined()) {
    Tensor x = value.toTensor();
    visit(x);
    value = std::move(x);
  }
}

// The node of outputs that have no gradient. What raises is an op, which a compiler can trace without running it.
struct NoGradient : torch::autograd::Function<NoGradient> {
  static constexpr bool is_traceable = true;

  // `outputs` is a function because tensors in the arguments would count as inputs.
  static variable_list forward(AutogradContext* ctx, at::TensorList inputs, const std::string& op,
                               const std::function<variable_list()>& outputs) {
    ctx->set_materialize_grads(false);
    ctx->saved_data["op"] = op;
    for (size_t i = 0; i < inputs.size(); ++i) {
      ctx->saved_data["size" + std::to_string(i)] = inputs[i].sym_sizes();
    }
    ctx->saved_data["inputs"] = static_cast<int64_t>(inputs.size());
    return outputs();
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    static const auto refuse =
        op_handle<Tensor(const Tensor&, std::string_view, c10::SymIntArrayRef)>(kRefuse);
    const auto given = std::find_if(gradients.begin(), gradients.end(),
                                    [](const Tensor& gradient) { return gradient.defined(); });
    const std::string op = ctx->saved_data["op"].toStringRef();
    const auto inputs = static_cast<size_t>(ctx->saved_data["inputs"].toInt());
    variable_list refused(inputs + 2);
    for (size_t i = 0; i < inputs && given != gradients.end(); ++i) {
      if (ctx->needs_input_grad(i)) {
        refused[i] = refuse.call(*given, op, ctx->saved_data["size" + std::to_string(i)].toSymIntVector());
      }
    }
    return refused;
  }
};

void call_without_gradient(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                           torch::jit::Stack* stack) {
  variable_list inputs;
  const size_t first = stack->size() - op.schema().arguments().size();
  for (size_t i = first; i < stack->size(); ++i) {
    for_each_tensor((*stack)[i], [&](const Tensor& x) { inputs.push_back(x); });
  }
  bool records = false;
  for (const Tensor& x : inputs) {
    records = needs_grad({x}) || records;
  }
  {
    at::AutoDispatchBelowAutograd guard;
    op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
  }
  if (!records) return;

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
  const std::function<variable_list()> plain = [&] { return outputs; };
  const variable_list recorded = NoGradient::apply(at::TensorList(inputs), op.schema().name(), plain);
  auto next = recorded.begin();
  for_each_output([&](Tensor& x) { x = *next++; });
}

// raise RuntimeError
Tensor refuse_backward(const Tensor& /*gradient*/, std::string_view op, c10::SymIntArrayRef /*size*/) {
  TORCH_CHECK(
      false, "derivative for ", op,
      " is not implemented: the op has no gradient. Call it under torch.no_grad(), or detach what requires "
      "one");
}

// gradient.new_empty(size)
Tensor refuse_backward_meta(const Tensor& gradient, std::string_view /*op*/, c10::SymIntArrayRef size) {
  return at::empty_symint(size, gradient.options());
}

}  // namespace

void register_no_gradient(torch::Library& autograd, std::initializer_list<const char*> ops) {
  for (const char* op : ops) {
    autograd.impl(op, torch::CppFunction::makeFromBoxedFunction<&call_without_gradient>());
  }
}

TORCH_LIBRARY_FRAGMENT(htree, library) {
  define_ops(library, {"refuse_backward(Tensor gradient, str op, SymInt[] size) -> Tensor"});
}

TORCH_LIBRARY_IMPL(htree, CPU, library) {
  library.impl("refuse_backward", TORCH_FN(refuse_backward));
}

#if defined(HTREE_WITH_CUDA)
TORCH_LIBRARY_IMPL(htree, CUDA, library) {
  library.impl("refuse_backward", TORCH_FN(refuse_backward));
}
#endif

TORCH_LIBRARY_IMPL(htree, Meta, library) {
  library.impl("refuse_backward", TORCH_FN(refuse_backward_meta));
}

TORCH_LIBRARY_IMPL(htree, Autograd, library) {
  register_no_gradient(library, {"refuse_backward"});
}

}  // namespace htree
