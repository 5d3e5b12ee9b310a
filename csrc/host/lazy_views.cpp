#include "host/lazy_views.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace htree {
namespace {

// Calls `visit` with the tensor of an argument, or those of a list, and keeps what it assigns to them.
template <typename Visit>
void for_each_tensor(c10::IValue& value, const Visit& visit) {
  if (value.isTensorList()) {
    std::vector<at::Tensor> list = value.toTensorVector();
    std::for_each(list.begin(), list.end(), visit);
    value = std::move(list);
  } else if (value.isTensor() && value.toTensor().defined()) {
    at::Tensor x = value.toTensor();
    visit(x);
    value = std::move(x);
  }
}

void run_on_values(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const size_t first = stack->size() - arguments.size();
  std::vector<std::pair<at::Tensor, at::Tensor>> written;  // view, its values
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = arguments[i].alias_info();
    for_each_tensor((*stack)[first + i], [&](at::Tensor& x) {
      if (!x.is_neg() && !x.is_conj()) return;
      const at::Tensor values = x.resolve_conj().resolve_neg();
      if (alias != nullptr && alias->isWrite()) {
        written.emplace_back(x, values);
      }
      x = values;
    });
  }
  op.callBoxed(stack);
  for (const auto& [view, values] : written) {
    view.copy_(values);
  }
}

}  // namespace

void register_lazy_views(torch::Library& library, const std::string& name) {
  for (const auto key : {c10::DispatchKey::Negative, c10::DispatchKey::Conjugate}) {
    library.impl(name.c_str(),
                 torch::dispatch(key, torch::CppFunction::makeFromBoxedFunction<&run_on_values>()));
  }
}

}  // namespace htree
