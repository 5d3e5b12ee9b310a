// Autograd and ADInplaceOrView of the ops of this folder that write. docs/semantics/conventions.md §0.5
#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>
#include <type_traits>

#include "host/autograd.h"
#include "host/op_handle.h"

namespace htree::tree_cache {

// Autograd and ADInplaceOrView kernels of the op kName. Its Meta kernel is kFunction, and it writes
// its first kWritten arguments, each of which may be a list.
template <const char* kName, auto kFunction, int kWritten, typename = decltype(kFunction)>
struct Mutating;
template <const char* kName, auto kFunction, int kWritten, typename Result, typename... Arguments>
struct Mutating<kName, kFunction, kWritten, Result (*)(Arguments...)> {
  static Result again(Arguments... arguments) {
    static const auto op = op_handle<Result(Arguments...)>(kName);
    return op.call(arguments...);
  }

  // For an op without results; one that has some gives them a node that raises.
  static Result autograd(Arguments... arguments) {
    (refuse(arguments), ...);
    at::AutoDispatchBelowAutograd guard;
    return again(arguments...);
  }

  static Result in_place(Arguments... arguments) {
    const auto run = [&] {
      at::AutoDispatchBelowADInplaceOrView guard;
      return again(arguments...);
    };
    const auto note = [&] {
      int place = 0;
      (bump(arguments, place++), ...);
    };
    if constexpr (std::is_void_v<Result>) {
      run();
      note();
    } else {
      Result result = run();
      note();
      return result;
    }
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
    if constexpr (std::is_same_v<Argument, at::TensorList>) {
      for (const at::Tensor& x : argument)
        bump(x, place);
    } else if constexpr (std::is_same_v<Argument, at::Tensor>) {
      if (place < kWritten && !argument.is_inference()) {
        argument.unsafeGetTensorImpl()->bump_version();
      }
    }
  }
};

}  // namespace htree::tree_cache
