// Run-time shape of a tensor-core launch to the compiled one. No torch.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <stdexcept>
#include <string>

#include "ops/tree_attention/cuda/launch_params.h"

namespace htree::tree_attention {

template <typename T>
struct TypeTag {
  using type = T;
};
template <int kValue>
struct IntTag {
  static constexpr int value = kValue;
};

// attention_config.h sends no other shape here; one that came all the same must not leave its outputs
// unwritten.
[[noreturn]] inline void refuse_shape(const std::string& what) {
  throw std::logic_error("tree attention: no tensor-core kernel for " + what);
}

// Blocks of `per_block` items each.
inline unsigned num_blocks(int64_t items, int64_t per_block) {
  return static_cast<unsigned>(ceil_div(items, per_block));
}

// Calls f(IntTag<n>) with the tiles of 8 rows that hold the `group` query heads of a kv head.
template <typename F>
auto dispatch_head_tiles(int group, F&& f) {
  switch ((group + 7) / 8) {
    case 1:
      return f(IntTag<1>{});
    case 2:
      return f(IntTag<2>{});
    default:
      refuse_shape("H / H_kv = " + std::to_string(group) + "; compiled: 1 ... 16");
  }
}

// Calls f(IntTag<G>) for the groups of a dense top.
template <typename F>
auto dispatch_dense_group(int group, F&& f) {
  switch (group) {
    case 1:
      return f(IntTag<1>{});
    case 2:
      return f(IntTag<2>{});
    case 4:
      return f(IntTag<4>{});
    case 8:
      return f(IntTag<8>{});
    case 16:
      return f(IntTag<16>{});
    default:
      refuse_shape("a dense top of H / H_kv = " + std::to_string(group) + "; compiled: 1 2 4 8 16");
  }
}

// Calls f(TypeTag<T>, IntTag<D>).
template <typename F>
auto dispatch_shape(const TensorCoreShape& shape, F&& f) {
  const auto with_dim = [&](auto tag) {
    switch (shape.key_dim == shape.value_dim ? shape.key_dim : 0) {
      case 32:
        return f(tag, IntTag<32>{});
      case 64:
        return f(tag, IntTag<64>{});
      case 128:
        return f(tag, IntTag<128>{});
      default:
        refuse_shape("head dims " + std::to_string(shape.key_dim) + ", " + std::to_string(shape.value_dim) +
                     "; compiled: 32 64 128");
    }
  };
  return shape.dtype == HalfType::kHalf ? with_dim(TypeTag<__half>{}) : with_dim(TypeTag<__nv_bfloat16>{});
}

}  // namespace htree::tree_attention
