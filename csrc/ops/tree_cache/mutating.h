// Autograd and ADInplaceOrView of the ops of this folder that write. docs/semantics/conventions.md §0.5
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
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

  // What is written has no gradient. Results depend on optional tensors, and a backward through them raises.
  static Result autograd(Arguments... arguments) {
    (refuse(arguments), ...);
    if constexpr (std::is_void_v<Result>) {
      at::AutoDispatchBelowAutograd guard;
      again(arguments...);
    } else {
      torch::autograd::variable_list inputs;
      (collect(arguments, inputs), ...);
      Result result = [&] {
        at::AutoDispatchBelowAutograd guard;
        return again(arguments...);
      }();
      if (inputs.empty()) return result;
      auto& [first, second] = result;
      const auto nodes = without_gradient(inputs,
                                          std::string("derivative for ") + kName +
                                              " is not implemented: rows of a cache have no gradient. "
                                              "Call it under torch.no_grad(), or detach what requires one",
                                          {first, second});
      return {nodes[0], nodes[1]};
    }
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
  static void collect(const Argument& argument, torch::autograd::variable_list& inputs) {
    if constexpr (std::is_same_v<Argument, std::optional<at::Tensor>>) {
      if (argument.has_value() && needs_grad({*argument})) inputs.push_back(*argument);
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
