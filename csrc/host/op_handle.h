// Typed handles of our own ops. Autograd and composed kernels call ops through the dispatcher, never kernels,
// so that Meta, functionalization, autocast and profilers see them.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <string_view>

namespace htree {

// What messages call an op: "attention" for "htree::attention" and for the private "htree::_attention".
constexpr std::string_view op_label(std::string_view name) {
  name.remove_prefix(std::string_view("htree::").size());
  if (name.front() == '_') name.remove_prefix(1);
  return name;
}

// Keep the result in a function-local static: the lookup takes a lock, the call does not.
//   static const auto op = op_handle<at::Tensor(const at::Tensor&, int64_t)>("htree::causal_softmax");
template <typename Signature>
c10::TypedOperatorHandle<Signature> op_handle(const char* name, const char* overload = "") {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, overload).template typed<Signature>();
}

}  // namespace htree
