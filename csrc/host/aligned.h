// Tensors as kernels that read 16 bytes at a time want them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace htree {

// x contiguous and starting at a multiple of 16 bytes: itself where it is both, else a copy.
inline at::Tensor aligned_contiguous(const at::Tensor& x) {
  const bool aligned = reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0;
  return aligned ? x.contiguous() : x.clone(at::MemoryFormat::Contiguous);
}

}  // namespace htree
