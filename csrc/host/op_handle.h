// Typed handles of our own ops. Autograd and composed kernels call ops through the dispatcher, never kernels,
// so that Meta, functionalization, autocast and profilers see them.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <string>
#include <string_view>

// The namespace of the ops in torch. A copy that may run beside another (`make kernels-folder`) has one of its own, and
// reads as if it were this one: names in the sources stay "htree::...".
#if !defined(HTREE_NAMESPACE)
#define HTREE_NAMESPACE htree
#endif

namespace htree {

constexpr std::string_view without_namespace(std::string_view name) {
  return name.substr(name.find("::") + 2);
}

// What messages call an op: "attention" for "htree::attention" and for the private "htree::_attention".
constexpr std::string_view op_label(std::string_view name) {
  name = without_namespace(name);
  if (name.front() == '_') name.remove_prefix(1);
  return name;
}

// "htree::attention" as it is registered.
inline std::string registered_name(std::string_view name) {
  return std::string(C10_STRINGIZE(HTREE_NAMESPACE) "::").append(without_namespace(name));
}

// Keep the result in a function-local static: the lookup takes a lock, the call does not.
//   static const auto op = op_handle<at::Tensor(const at::Tensor&, int64_t)>("htree::causal_softmax");
template <typename Signature>
c10::TypedOperatorHandle<Signature> op_handle(const char* name, const char* overload = "") {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(registered_name(name).c_str(), overload)
      .template typed<Signature>();
}

}  // namespace htree
