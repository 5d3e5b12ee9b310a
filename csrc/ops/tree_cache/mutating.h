// Autograd and ADInplaceOrView of the ops of the room that write. docs/semantics/conventions.md §0.5
#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>
#include <type_traits>

#include "host/autograd.h"
#include "host/op_handle.h"

namespace htree::tree_cache {

// Autograd and ADInplaceOrView kernels of the op kName. Its Meta kernel is kFunction, and it writes
// its first kWritten arguments.
template <const char* kName, auto kFunction, int kWritten, typename = decltype(kFunction)>
struct Mutating;
template <const char* kName, auto kFunction, int kWritten, typename... Arguments>
struct Mutating<kName, kFunction, kWritten, void (*)(Arguments...)> {
  static void again(Arguments... arguments) {
    static const auto op = op_handle<void(Arguments...)>(kName);
    op.call(arguments...);
  }

  static void autograd(Arguments... arguments) {
    (refuse(arguments), ...);
    at::AutoDispatchBelowAutograd guard;
    again(arguments...);
  }

  static void in_place(Arguments... arguments) {
    {
      at::AutoDispatchBelowADInplaceOrView guard;
      again(arguments...);
    }
    int place = 0;
    (bump(arguments, place++), ...);
  }

 private:
  template <typename Argument>
  static void refuse(const Argument& argument) {
    if constexpr (std::is_same_v<Argument, at::Tensor>) {
      refuse_grad(op_label(kName).data(), {argument});  // the label ends where the name does
    }
  }
  template <typename Argument>
  static void bump(const Argument& argument, int place) {
    if constexpr (std::is_same_v<Argument, at::Tensor>) {
      if (place < kWritten && !argument.is_inference()) {
        argument.unsafeGetTensorImpl()->bump_version();
      }
    }
  }
};

}  // namespace htree::tree_cache
