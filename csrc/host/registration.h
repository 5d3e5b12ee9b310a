// What the registrations of all families share.
#pragma once

#include <torch/library.h>

#include <initializer_list>
#include <string>
#include <utility>

#include "host/op_handle.h"

namespace htree {

// The ops can be traced (pt2_compliant_tag), and a compiler must give them the strides of eager mode. They refuse vmap.
//
// What Autograd, ADInplaceOrView and lazy views (docs/semantics/conventions.md §0.5) need of a mutating op stands in its
// schema, so it is registered here. Its Tensor arguments must not require grad, what it returns has no gradient, and it
// bumps the versions of what it writes.
void define_ops(torch::Library& library, std::initializer_list<std::string> schemas);

// The Autocast kernels of ops whose Tensor arguments take the autocast dtype (float64 stays); those of Tensor? and other
// states keep theirs.
void register_autocast(torch::Library& library, std::initializer_list<const char*> ops);

using c10::DispatchKey;

// The kernels of ops for one dispatch key.
class OpKernels {
 public:
  OpKernels(torch::Library& library, DispatchKey key) : library_(library), key_(key) {}

  template <typename Function>
  void impl(const char* op, Function&& function) const {
    library_.impl(op, torch::dispatch(key_, std::forward<Function>(function)));
  }

 private:
  torch::Library& library_;
  DispatchKey key_;
};

}  // namespace htree
