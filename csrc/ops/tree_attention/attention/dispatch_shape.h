// Run-time shape of a tensor-core launch to the compiled one. No torch.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdio>
#include <cstdlib>

#include "ops/tree_attention/attention/attention_launch.h"

namespace htree::tree_attention {

template <typename T>
struct TypeTag {
  using type = T;
};
template <int kValue>
struct IntTag {
  static constexpr int value = kValue;
};

// Calls f(TypeTag<T>, IntTag<D>). attention_config.h sends no other shape here, and one that came all the
// same must not leave its outputs unwritten.
template <typename F>
void dispatch_shape(const TensorCoreShape& shape, F&& f) {
  const auto with_dim = [&](auto tag) {
    switch (shape.key_dim == shape.value_dim ? shape.key_dim : 0) {
      case 32:
        return f(tag, IntTag<32>{});
      case 64:
        return f(tag, IntTag<64>{});
      case 128:
        return f(tag, IntTag<128>{});
      default:
        std::fprintf(stderr,
                     "tree attention: head dims %d, %d have no tensor-core kernel; compiled: 32 64 128\n",
                     shape.key_dim, shape.value_dim);
        std::abort();
    }
  };
  if (shape.dtype == HalfType::kHalf) {
    with_dim(TypeTag<__half>{});
  } else {
    with_dim(TypeTag<__nv_bfloat16>{});
  }
}

}  // namespace htree::tree_attention
