#include "host/lazy_views.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <utility>
#include <vector>

#include "host/each_tensor.h"

namespace htree {
namespace {

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
