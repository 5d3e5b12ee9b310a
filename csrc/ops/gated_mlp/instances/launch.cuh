// Configuration to kernel: every one that choose_config or a forced tuple can name is listed here.
#pragma once

#include <algorithm>
#include <type_traits>

#include "host/cuda/kernel_launch.h"
#include "host/cuda/launch_cluster.h"
#include "host/cuda/tensor_map.h"
#include "ops/gated_mlp/gated_mlp_launch.h"

namespace htree::gated_mlp {
namespace {

template <typename T>
inline constexpr CUtensorMapDataType kMapType =
    std::is_same_v<T, __half> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;

// Of a matrix of `columns` x `rows` elements, rows `pitch` elements apart.
template <typename T>
CUtensorMap matrix_map(const T* data, int64_t rows, int64_t columns, int64_t pitch, int box_rows) {
  return row_major_map(data, kMapType<T>, rows, columns, pitch * static_cast<int64_t>(sizeof(T)), box_rows);
}

// The same, for tiles of kRows rows.
template <int kRows, typename T>
device::OperandMaps row_maps(const Operand<T>& x, int64_t rows, int64_t columns) {
  return operand_maps(x.data, kMapType<T>, rows, columns, x.pitch * static_cast<int64_t>(sizeof(T)), kRows,
                      kRows);
}

inline int num_k_blocks(int64_t k) {
  return static_cast<int>((k + 63) / 64);
}

}  // namespace
}  // namespace htree::gated_mlp
