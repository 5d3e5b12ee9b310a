// The tensors of an argument of a boxed kernel.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace htree {

// Calls `visit` with every defined tensor of `value`, those of a list too, and keeps what it assigns to them.
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

}  // namespace htree
