#include "host/registration.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <utility>
#include <vector>

#include "host/autograd.h"
#include "host/each_tensor.h"
#include "host/no_gradient.h"
#include "host/op_handle.h"

namespace htree {
namespace {

using at::Tensor;
using torch::jit::Stack;

// Calls `visit` with the arguments of a call on a stack, and what the schema says of each.
template <typename Visit>
void for_each_argument(const c10::OperatorHandle& op, Stack* stack, const Visit& visit) {
  const std::vector<c10::Argument>& arguments = op.schema().arguments();
  const size_t first = stack->size() - arguments.size();
  for (size_t i = 0; i < arguments.size(); ++i) {
    visit(arguments[i], (*stack)[first + i]);
  }
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

bool is_tensor(const c10::Argument& argument) {
  return argument.type()->kind() == c10::TypeKind::TensorType;
}

// torch's fallback would call the op once per element of the mapped dim, and fails on lists of tensors.
void refuse_vmap(const c10::OperatorHandle& op, Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, op_label(op.schema().name()),
      ": torch.func.vmap is not supported; give the mapped dim to the op as its batch "
      "dim, or call the op in a loop over it");
}

// ---- mutating ops

// torch's fallbacks would record no node for an op that returns nothing, and silently give wrong gradients.
void refuse_gradients(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  for_each_argument(op, stack, [&](const c10::Argument& argument, const c10::IValue& value) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        !is_tensor(argument) || !needs_grad({value.toTensor()}), op_label(c10::toString(op.operator_name())),
        ": this op writes into its arguments and has no gradient; call it under torch.no_grad() "
        "or on tensors that do not require grad, or use the functional op");
  });
  call_without_gradient(op, keys, stack);
}

void bump_versions(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  std::vector<Tensor> written;
  for_each_argument(op, stack, [&](const c10::Argument& argument, c10::IValue& value) {
    if (is_written(argument)) for_each_tensor(value, [&](const Tensor& x) { written.push_back(x); });
  });
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
  }
  for (const Tensor& x : written) {
    if (!x.is_inference()) x.unsafeGetTensorImpl()->bump_version();
  }
}

// Lazy views are tensors whose values are negated or conjugated when they are read (Tensor.is_neg, is_conj). The op runs on
// tensors with the view's values, and its results are written back into the view. Torch's own kernels for these keys expect
// a mutating op to return what it wrote.
void run_on_values(const c10::OperatorHandle& op, Stack* stack) {
  std::vector<std::pair<Tensor, Tensor>> written;  // view, its values
  for_each_argument(op, stack, [&](const c10::Argument& argument, c10::IValue& value) {
    for_each_tensor(value, [&](Tensor& x) {
      if (!x.is_neg() && !x.is_conj()) return;
      const Tensor values = x.resolve_conj().resolve_neg();
      if (is_written(argument)) written.emplace_back(x, values);
      x = values;
    });
  });
  op.callBoxed(stack);
  for (const auto& [view, values] : written) {
    view.copy_(values);
  }
}

// ---- Autocast

template <at::DeviceType kDevice>
void cast_tensors(const c10::OperatorHandle& op, Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard guard(at::autocast::get_autocast_dispatch_key_from_device_type(kDevice));
  const at::ScalarType dtype = at::autocast::get_autocast_dtype(kDevice);
  for_each_argument(op, stack, [&](const c10::Argument& argument, c10::IValue& value) {
    if (is_tensor(argument)) value = at::autocast::cached_cast(dtype, value.toTensor(), kDevice);
  });
  op.callBoxed(stack);
}

template <auto* kFunction>
void impl_boxed(torch::Library& library, DispatchKey key, const char* op) {
  OpKernels(library, key).impl(op, torch::CppFunction::makeFromBoxedFunction<kFunction>());
}

}  // namespace

void define_ops(torch::Library& library, std::initializer_list<std::string> schemas) {
  library.set_python_module("htree_ops");
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag, at::Tag::needs_exact_strides};
  for (const std::string& schema : schemas) {
    c10::FunctionSchema parsed = torch::schema(schema.c_str());
    const bool is_mutable = parsed.is_mutable();
    const std::string op = c10::toString(parsed.operator_name());
    library.def(std::move(parsed), tags);
    impl_boxed<&refuse_vmap>(library, DispatchKey::FuncTorchBatched, op.c_str());
    if (is_mutable) {
      impl_boxed<&refuse_gradients>(library, DispatchKey::Autograd, op.c_str());
      impl_boxed<&bump_versions>(library, DispatchKey::ADInplaceOrView, op.c_str());
      impl_boxed<&run_on_values>(library, DispatchKey::Negative, op.c_str());
      impl_boxed<&run_on_values>(library, DispatchKey::Conjugate, op.c_str());
    }
  }
}

void register_autocast(torch::Library& library, std::initializer_list<const char*> ops) {
  for (const char* op : ops) {
    impl_boxed<&cast_tensors<at::kCPU>>(library, DispatchKey::AutocastCPU, op);
    impl_boxed<&cast_tensors<at::kCUDA>>(library, DispatchKey::AutocastCUDA, op);
  }
}

}  // namespace htree
