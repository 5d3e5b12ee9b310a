// Tensors for kernels that read 16 bytes at a time.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace htree {

// Makes x contiguous and aligned to 16 bytes: x itself if it is both, else a copy.
inline at::Tensor aligned_contiguous(const at::Tensor& x) {
  const bool aligned = reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0;
  return aligned ? x.contiguous() : x.clone(at::MemoryFormat::Contiguous);
}

}  // namespace htree
