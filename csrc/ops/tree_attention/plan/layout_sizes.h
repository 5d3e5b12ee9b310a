// Sizes in bytes of what the tensor-core kernels keep beside the tree. No CUDA: the choice of chunks counts
// them too.
#pragma once

#include <cstdint>

namespace htree::tree_attention {

constexpr int kTensorCoreRate = 16;  // r of every tensor-core kernel

// Queries that share a task of backward/per_list/ at the top, where they need no lists.
constexpr int kGradientRun = 16;

// Query rows (query, head) of a task of backward/per_list/: a list has stride * G of them in
// ceil(stride * G / kGradientRows) tasks.
constexpr int kGradientRows = 128;

// A parent's block of packed keys and values, see packed_layer.cuh.
constexpr int64_t packed_parent_bytes(int64_t key_dim, int64_t value_dim) {
  return kTensorCoreRate * (2 * key_dim + 4 + 2 * value_dim);
}

// A query's record of 8 heads, see gradient_rows.cuh.
constexpr int64_t tiled_record_bytes(int64_t key_dim, int64_t value_dim) {
  return 8 * (2 * (key_dim + value_dim) + 16);
}

// A rotation table, see launch_params.h.
constexpr int64_t rotation_table_bytes(int64_t num_slots, int64_t key_dim) {
  return num_slots * key_dim * 2;
}

// A tile of keys or of values of a dense top layer, see dense_layer.cuh.
constexpr int kDenseTileNodes = 128;
constexpr int64_t dense_tile_bytes(int64_t dim) {
  return (dim + 63) / 64 * kDenseTileNodes * 128;
}

}  // namespace htree::tree_attention
