// The check of given scales on the CPU, where their values are at hand: a scale that no
// quantiser makes is refused.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cmath>

namespace htree::fp8 {

// `scale` is fp32 on the CPU, with any strides.
inline void check_scale_values(const char* op, const char* name, const at::Tensor& scale) {
  const at::Tensor values = scale.contiguous();
  const float* data = values.const_data_ptr<float>();
  for (int64_t i = 0; i < values.numel(); ++i) {
    TORCH_CHECK_VALUE(std::isfinite(data[i]) && data[i] > 0, op, ": ", name,
                      " must be positive and finite, got ", data[i]);
  }
}

}  // namespace htree::fp8
