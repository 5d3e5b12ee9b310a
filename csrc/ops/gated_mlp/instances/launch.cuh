// Configuration to kernel: every one that choose_config or a forced tuple can name is listed here.
#pragma once

#include <algorithm>
#include <type_traits>

#include "host/launch_cluster.h"
#include "host/tensor_map.h"
#include "ops/gated_mlp/gated_mlp_launch.h"

namespace htree::gated_mlp {
namespace {

template <typename T>
inline constexpr CUtensorMapDataType kMapType =
    std::is_same_v<T, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;

// Boxes of 64 elements x `box_rows` rows of a matrix of `columns` x `rows`.
template <typename T>
CUtensorMap matrix_map(const T* data, int64_t rows, int64_t columns, int64_t pitch, int box_rows) {
  TensorBox box;
  box.data = data;
  box.type = kMapType<T>;
  box.sizes[0] = static_cast<uint64_t>(columns);
  box.sizes[1] = static_cast<uint64_t>(rows);
  box.strides_bytes[0] = static_cast<uint64_t>(pitch) * sizeof(T);
  box.box[0] = 64;
  box.box[1] = static_cast<uint32_t>(box_rows);
  return make_tensor_map(box);
}

inline int num_k_blocks(const Sizes& sizes) {
  return static_cast<int>((sizes.hidden + 63) / 64);
}

}  // namespace
}  // namespace htree::gated_mlp
