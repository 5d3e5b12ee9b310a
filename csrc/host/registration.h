// What the registrations of all families share: the tags of the schemas and the refusal of vmap.
#pragma once

#include <torch/library.h>

#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "host/lazy_views.h"
#include "host/op_handle.h"

namespace htree {

// torch's fallback would call the op once per element of the mapped dim, and fails on lists of tensors.
inline void refuse_vmap(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, op_label(op.schema().name()),
      ": torch.func.vmap is not supported; give the mapped dim to the op as its batch "
      "dim, or call the op in a loop over it");
}

// The ops can be traced (pt2_compliant_tag), and a compiler must give them the strides of eager mode.
// Mutating ops take lazy views (host/lazy_views.h).
inline void define_ops(torch::Library& library, std::initializer_list<const char*> schemas) {
  library.set_python_module("htree_ops");
  const std::vector<at::Tag> tags = {at::Tag::pt2_compliant_tag, at::Tag::needs_exact_strides};
  for (const char* schema : schemas) {
    c10::FunctionSchema parsed = torch::schema(schema);
    const bool is_mutable = parsed.is_mutable();
    const std::string name = c10::toString(parsed.operator_name());
    library.def(std::move(parsed), tags);
    library.impl(name.c_str(), torch::dispatch(c10::DispatchKey::FuncTorchBatched,
                                               torch::CppFunction::makeFromBoxedFunction<&refuse_vmap>()));
    if (is_mutable) {
      register_lazy_views(library, name);
    }
  }
}

}  // namespace htree
