// What the launches of the tensor-core kernels share: r = 16, fp16 or bf16 inputs. No torch.
//
// A launch works on one chunk: `num_batches` batches and `num_queries` consecutive queries. The first
// stands at token t0, a multiple of the selection stride. Queries i with the same i / stride share
// one list of parents.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>
#include <vector_types.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "ops/tree/plan/problem.h"
#include "ops/tree/tree_args.h"

namespace htree::tree_attention {

enum class HalfType { kHalf, kBFloat16 };

// [B, rows, heads, D] with a unit last stride; strides in elements.
struct TensorView {
  const void* data = nullptr;
  int64_t batch = 0;
  int64_t row = 0;
  int64_t head = 0;
  bool aligned = false;  // every row starts at a multiple of 16 bytes
};

// What a forward left of each row, [B, T_q, H] from the first query of a chunk on, in natural units, and the gradient of
// its log-sum-exp; null: there is none.
struct RowStates {
  const float* max = nullptr;
  const float* sum = nullptr;
  const float* lse_gradients = nullptr;
  int64_t batch = 0;  // stride in elements
};

// D of dS = P (dP - D) for a row of these states: dO * O, summed over V, less the gradient of the log-sum-exp.
HTREE_HOST_DEVICE float row_delta(const RowStates& states, int64_t row, float products) {
  return states.lse_gradients ? products - states.lse_gradients[row] : products;
}

// The shape that a tensor-core kernel is compiled for.
struct TensorCoreShape {
  HalfType dtype = HalfType::kBFloat16;
  int key_dim = 0;
  int value_dim = 0;
};

// The queries, lists and keys of one layer.
struct GatherParams {
  TensorView queries;            // [B, T_q, H, K], from the first query of the chunk
  const char* packed = nullptr;  // [B, H_kv, num_parents] packed parents of the layer
  int64_t num_parents = 0;
  // [B, num_lists, H_kv, list_width]; null, implied: parents 0, 1, ... up to the own
  const int32_t* lists = nullptr;
  int64_t list_batch = 0;  // stride in elements
  // Of a caller's lists, [B, num_lists, H_kv]: the entries of each, or their complement (~) where the queries' diagonal
  // parent is none of them. Null: it is every list's last entry. forward/per_list/ reads those of implied lists, which may
  // have more than list_width entries.
  const int32_t* list_sizes = nullptr;
  const float2* rope = nullptr;  // [list_capacity() * 16 + 1, K/2]
  float score_scale = 0.f;       // scale * log2(e), so that scores are in log2 units
  int64_t node_span = 1;         // tokens per node of the layer
  int64_t t0 = 0;
  int num_queries = 0;
  int num_lists = 0;
  int num_batches = 0;
  int num_kv_heads = 0;
  int group = 0;       // G
  int list_width = 0;  // of these lists, and of those of the layer below
  int stride = 1;

  // How far apart the first entries of neighbouring lists are where entries are numbered: an implied list names every
  // parent.
  HTREE_HOST_DEVICE uint32_t entries_of_list() const {
    return static_cast<uint32_t>(lists ? list_width : num_parents);
  }
};

// ---- from the run-time shape of a launch to a compiled one

template <typename T>
struct TypeTag {
  using type = T;
};
template <int kValue>
struct IntTag {
  static constexpr int value = kValue;
};

// plan/ sends no other shape here. If one came all the same, its outputs must not stay unwritten.
[[noreturn]] inline void refuse_shape(const std::string& what) {
  throw std::logic_error("tree attention: no tensor-core kernel for " + what);
}

// Blocks needed where each takes `per_block` items.
inline unsigned num_blocks(int64_t items, int64_t per_block) {
  return static_cast<unsigned>(ceil_div(items, per_block));
}

// Calls f(IntTag<n>), n being the number of 8-row tiles that hold the `group` query heads of a kv head.
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

// Calls f(IntTag<G>) for the values of G that a dense top takes.
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
